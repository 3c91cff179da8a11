#Requires -Version 5.1
#Requires -RunAsAdministrator
<#
.SYNOPSIS
Removes the service and the venv that install.ps1 has made. Policy, state and logs stay, unless asked. Run again, it
does nothing.

.PARAMETER Path
Where the venv is.

.PARAMETER Data
Remove policy, hooks, state and logs as well.
#>
[CmdletBinding()]
param(
    [string] $Path = (Join-Path $env:ProgramFiles 'scheduled-events-agent'),
    [switch] $Data
)
$ErrorActionPreference = 'Stop'

$python = Join-Path $Path 'Scripts\python.exe'
if (Test-Path $python) {
    & $python @('-I', '-m', 'agent', 'service', 'remove')
    if ($LASTEXITCODE -ne 0) { throw "the service could not be removed: exit code $LASTEXITCODE" }
    Remove-Item -Recurse -Force $Path
}
if ($Data) {
    $folder = Join-Path $env:ProgramData 'ScheduledEventsAgent'
    if (Test-Path $folder) { Remove-Item -Recurse -Force $folder }
}
