# A startup script for group policy: installs the MSI once, and puts a changed policy into force. The file keeps its access
# list.
# The share must be readable for Domain Computers, and writable for administrators only.
$ErrorActionPreference = 'Stop'
$share = '\\contoso.example\deploy\scheduled-events-agent'
$policy = "$env:ProgramData\ScheduledEventsAgent\policy.yaml"
if (-not (Get-Service ScheduledEventsAgent -ErrorAction SilentlyContinue)) {
    $arguments = "/i `"$share\scheduled-events-agent-0.1.0-x64.msi`" /qn POLICY=`"$share\policy.yaml`""
    exit (Start-Process msiexec -ArgumentList $arguments -Wait -PassThru).ExitCode
}
if ((Get-FileHash "$share\policy.yaml").Hash -ne (Get-FileHash $policy).Hash) {
    $agent = "$env:ProgramFiles\Scheduled Events Agent\bin\scheduled-events-agent.cmd"
    & $agent check --config "$share\policy.yaml"
    if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }   # with a bad file the service would not start again
    Copy-Item "$share\policy.yaml" $policy
    & $agent service reload   # names the keys that need a restart
    exit $LASTEXITCODE
}
