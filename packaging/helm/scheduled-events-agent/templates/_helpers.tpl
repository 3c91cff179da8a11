{{- define "scheduled-events-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "scheduled-events-agent.fullname" -}}
{{- $name := include "scheduled-events-agent.name" . }}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $whole .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "scheduled-events-agent.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "scheduled-events-agent.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name: name the account, as serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "scheduled-events-agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "scheduled-events-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "scheduled-events-agent.labels" -}}
{{ include "scheduled-events-agent.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* The text of the policy file. */}}
{{- define "scheduled-events-agent.policy" -}}
{{- if and .Values.aks .Values.policy }}
{{- fail "policy replaces the whole policy, and so that of aks: true; give one of the two" }}
{{- else if .Values.policy }}
{{- toYaml .Values.policy }}
{{- else if .Values.aks }}
{{- .Files.Get "policies/aks.yaml" }}
{{- else }}
{{- .Files.Get "policies/kubernetes.yaml" }}
{{- end }}
{{- end }}

{{- /* How the pages are asked for: by HTTPS if the policy names a file with TLS. */}}
{{- define "scheduled-events-agent.scheme" -}}
{{- ternary "https" "http" (not (empty (dig "agent" "web_config" "" .Values.policy))) }}
{{- end }}

{{- /* A probe without a host asks the pod's own address, which is the node's. */}}
{{- define "scheduled-events-agent.probe" -}}
httpGet:
  scheme: {{ include "scheduled-events-agent.scheme" . | upper }}
  {{- if not .Values.monitoring.podMonitor }}
  host: 127.0.0.1
  {{- end }}
  port: 9769
  path: /status
timeoutSeconds: 10
{{- end }}
