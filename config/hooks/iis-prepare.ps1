#Requires -Version 5.1
<#
.SYNOPSIS
Lets IIS finish the requests that an application pool is answering, then stops the pool: a prepare hook.

.DESCRIPTION
Needs the features Web-Scripting-Tools and Web-Request-Monitor (Install-WindowsFeature), and an administrator; the
agent's service is one. May run again at any time: a pool that is stopped is as it should be.

Exit code 0: the pool is stopped. 1: an error, which the log shows.

.PARAMETER Pool
The application pool.

.PARAMETER Finish
Seconds that requests have to end by themselves; never more than 20 seconds less than the event leaves. What runs then
has the pool's own shutdown time limit, and is cut off.
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory)] [string] $Pool,
    [int] $Finish = 60
)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
Import-Module WebAdministration

function Get-State { (Get-WebAppPoolState -Name $Pool).Value }

if ($env:SCHEDULED_EVENT_SECONDS_LEFT) {
    $Finish = [math]::Max(0, [math]::Min($Finish, [int] $env:SCHEDULED_EVENT_SECONDS_LEFT - 20))
}
if ((Get-State) -eq 'Started') {
    "$Pool has $Finish s for the requests that it is answering"
    $deadline = (Get-Date).AddSeconds($Finish)
    while (($busy = @(Get-WebRequest -AppPool $Pool).Count) -gt 0) {
        if ((Get-Date) -ge $deadline) {
            "$busy requests still run after $Finish s"
            break
        }
        Start-Sleep -Seconds 1
    }
    # Somebody else may have stopped it meanwhile.
    if ((Get-State) -eq 'Started') { Stop-WebAppPool -Name $Pool }
}
while ((Get-State) -eq 'Stopping') { Start-Sleep -Seconds 1 }   # the hook's timeout ends it
if ((Get-State) -ne 'Stopped') { throw "expected the pool $Pool to be stopped; it is $(Get-State)" }
"$Pool is stopped"
