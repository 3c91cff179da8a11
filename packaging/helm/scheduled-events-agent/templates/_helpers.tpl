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

{{- /* The condition by which an admission policy is for this account alone. */}}
{{- define "scheduled-events-agent.thisAccount" -}}
- name: this-account
  expression: >-
    request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:{{ include "scheduled-events-agent.serviceAccount" . }}'
{{- end }}

{{- /* The account, as the subjects of bindings. */}}
{{- define "scheduled-events-agent.subjects" -}}
- kind: ServiceAccount
  name: {{ include "scheduled-events-agent.serviceAccount" . }}
  namespace: {{ .Release.Namespace | quote }}
{{- end }}

{{- define "scheduled-events-agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "scheduled-events-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "scheduled-events-agent.labels" -}}
{{ include "scheduled-events-agent.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Whether the agent writes conditions of its node: text if so. */}}
{{- define "scheduled-events-agent.hasConditions" -}}
{{- if or .Values.node.condition .Values.node.lifecycle_conditions }}true{{ end }}
{{- end }}

{{- /* The sections that the values node and fleet add to the policy, as YAML. notify: all of its targets. */}}
{{- define "scheduled-events-agent.sections" -}}
{{- $policy := .Values.policy }}
{{- $sections := dict }}
{{- if or (include "scheduled-events-agent.hasConditions" .) .Values.node.events }}
{{- if hasKey $policy "kubernetes" }}
{{- fail "policy.kubernetes is what the value node adds: take it out of the policy, or set all of node to false" }}
{{- end }}
{{- $_ := set $sections "kubernetes" .Values.node }}
{{- end }}
{{- if .Values.node.events }}
{{- $names := list }}
{{- $formats := list }}
{{- range $policy.notify }}
{{- $names = append $names .name }}
{{- $formats = append $formats .format }}
{{- end }}
{{- if not (has "kubernetes" $formats) }}
{{- if has "kubernetes" $names }}
{{- fail "policy.notify has a target kubernetes, as node.events adds one: give it another name, or set node.events to false" }}
{{- end }}
{{- $target := dict "name" "kubernetes" "format" "kubernetes" }}
{{- $_ := set $sections "notify" (append (default list $policy.notify) $target) }}
{{- end }}
{{- end }}
{{- if .Values.fleet.enabled }}
{{- if hasKey $policy "fleet" }}
{{- fail "policy.fleet is what the value fleet adds: take it out of the policy, or set fleet.enabled to false" }}
{{- end }}
{{- if has .Release.Namespace (list "kube-system" "kube-node-lease") }}
{{- fail (printf "fleet.enabled is not for the namespace %s: the agent may change Leases in its namespace, and those there elect the leaders of the control plane, or say that nodes are alive; install the chart into a namespace of its own" .Release.Namespace) }}
{{- end }}
{{- $fleet := dict "leases" .Release.Namespace }}
{{- with .Values.fleet.group }}{{ $_ := set $fleet "group" . }}{{ end }}
{{- with .Values.fleet.maxEvents }}{{ $_ := set $fleet "max_events" . }}{{ end }}
{{- $_ := set $sections "fleet" $fleet }}
{{- end }}
{{- toYaml $sections }}
{{- end }}

{{- /* The text of the policy file. */}}
{{- define "scheduled-events-agent.policy" -}}
{{- $sections := include "scheduled-events-agent.sections" . | fromYaml }}
{{- if and .Values.aks .Values.policy }}
{{- fail "policy replaces the whole policy, and so that of aks: true; give one of the two" }}
{{- else if .Values.policy }}
{{- merge $sections .Values.policy | toYaml }}
{{- else }}
{{- $text := .Files.Get (ternary "policies/aks.yaml" "policies/kubernetes.yaml" .Values.aks) }}
{{- if .Values.node.lifecycle_conditions }}
{{- $text = regexReplaceAll "kubernetes, (drain|uncordon)]" $text "kubernetes, ${1}, --conditions]" }}
{{- end }}
{{- $text }}
{{- with $sections }}
# From the values node and fleet of the chart.
{{ toYaml . }}
{{- end }}
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
