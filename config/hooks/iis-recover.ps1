#Requires -Version 5.1
<#
.SYNOPSIS
Starts the application pool of IIS that iis-prepare.ps1 has stopped, and ends when it is started: a recover hook, and one
for on_clear.

.DESCRIPTION
Needs the feature Web-Scripting-Tools (Install-WindowsFeature), and an administrator; the agent's service is one. May run
again at any time: a pool that is started is as it should be, and one that an operator stopped before the event is
left as it is. One that is just stopping (the event was canceled in the middle of iis-prepare.ps1) is awaited first.

Exit code 0: the pool is started, or was not stopped by iis-prepare.ps1. 1: an error, which the log shows.

.PARAMETER Pool
The application pool.

.PARAMETER Mark
As for iis-prepare.ps1.
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory)] [string] $Pool,
    [string] $Mark = "$env:ProgramData\ScheduledEventsAgent\state\$([uri]::EscapeDataString($Pool)).stopped-by-agent"
)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'

if (-not (Test-Path -LiteralPath $Mark)) {
    'not stopped by iis-prepare.ps1: left as it is'
    exit 0
}
Import-Module WebAdministration

function Get-State { (Get-WebAppPoolState -Name $Pool).Value }

# After a boot, IIS may still be starting.
$iis = Get-Service -Name W3SVC
if ($iis.Status -ne 'Running') { Start-Service -InputObject $iis }
$iis.WaitForStatus('Running', [TimeSpan]::FromMinutes(1))

while ((Get-State) -eq 'Stopping') { Start-Sleep -Seconds 1 }   # the hook's timeout ends it
if ((Get-State) -eq 'Stopped') { Start-WebAppPool -Name $Pool }
while ((Get-State) -eq 'Starting') { Start-Sleep -Seconds 1 }
if ((Get-State) -ne 'Started') { throw "expected the pool $Pool to be started; it is $(Get-State)" }
Remove-Item -LiteralPath $Mark
"$Pool is started"
