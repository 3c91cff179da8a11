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

.EXAMPLE
powershell.exe -ExecutionPolicy Bypass -File .\winservice\uninstall.ps1 -Data
#>
[CmdletBinding()]
param(
    [string] $Path = (Join-Path $env:ProgramFiles 'scheduled-events-agent'),
    [switch] $Data
)
$ErrorActionPreference = 'Stop'

$service = Get-CimInstance Win32_Service -Filter "Name='ScheduledEventsAgent'"
$venv = Join-Path $Path 'Scripts\python.exe'
if ($service -and $service.PathName -like '* -I -m scheduled_events_agent service host*') {
    throw "the service does not run from a venv, but most likely from the MSI: remove it with msiexec /x"
}
if ($service) {
    if (-not (Test-Path -LiteralPath $venv)) { throw "the service is there, but no venv in ${Path}: name it with -Path" }
    # With its streams redirected, PowerShell 5.1 takes a program's warnings for errors; its exit code counts.
    $ErrorActionPreference = 'Continue'
    & $venv @('-I', '-m', 'scheduled_events_agent', 'service', 'remove')
    $ErrorActionPreference = 'Stop'
    if ($LASTEXITCODE -ne 0) {
        throw "the service could not be removed (exit code $LASTEXITCODE): mend the venv with install.ps1 and try again"
    }
    # The process ends a little later than the service.
    if ($service.ProcessId) { Wait-Process -Id $service.ProcessId -Timeout 30 -ErrorAction SilentlyContinue }
}
if (Test-Path -LiteralPath (Join-Path $Path 'pyvenv.cfg')) { Remove-Item -LiteralPath $Path -Recurse -Force }
if ($Data) {
    $folder = Join-Path $env:ProgramData 'ScheduledEventsAgent'
    if (Test-Path -LiteralPath $folder) { Remove-Item -LiteralPath $folder -Recurse -Force }
}
