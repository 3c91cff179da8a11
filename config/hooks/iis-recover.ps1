#Requires -Version 5.1
<#
.SYNOPSIS
Starts an application pool of IIS, and ends when it is started: a recover hook, and one for on_clear.

.DESCRIPTION
Needs the feature Web-Scripting-Tools (Install-WindowsFeature), and an administrator; the agent's service is one. May run
again at any time: a pool that is started is as it should be. One that is just stopping (the event was canceled in the
middle of iis-prepare.ps1) is awaited first.

Exit code 0: the pool is started. 1: an error, which the log shows.

.PARAMETER Pool
The application pool.
#>
[CmdletBinding()]
param([Parameter(Mandatory)] [string] $Pool)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
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
"$Pool is started"
