#Requires -Version 5.1
<#
.SYNOPSIS
Lets IIS finish the requests that an application pool is answering, then stops the pool: a prepare hook.

.DESCRIPTION
Needs the features Web-Scripting-Tools and Web-Request-Monitor (Install-WindowsFeature), and an administrator; the
agent's service is one. May run again at any time: a pool that is stopped is as it should be. What it has stopped itself
it marks, for iis-recover.ps1 to start that and nothing else. The mark says for which event, and how many worker
processes the pool had had by then: if that has changed, an administrator has started it since, and its next stop is theirs
once the event is over.

Exit code 0: the pool is stopped, or IIS itself does not run. 1: an error, which the log shows.

.PARAMETER Pool
The application pool.

.PARAMETER Finish
Seconds that requests have to end by themselves; never more than 20 seconds less than the event leaves. What runs then
has the pool's own shutdown time limit, and is cut off.

.PARAMETER Mark
The mark, a file. By default its name is the pool's, .stopped-by-agent, and it lies with the agent's state.
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory)] [string] $Pool,
    [int] $Finish = 60,
    [string] $Mark = "$env:ProgramData\ScheduledEventsAgent\state\$([uri]::EscapeDataString($Pool)).stopped-by-agent"
)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
. "$PSScriptRoot\iis-common.ps1"

# Pools have no state then.
if ((Get-Service -Name W3SVC).Status -eq 'Stopped') {
    'IIS does not run'
    exit 0
}
if ($env:SCHEDULED_EVENT_SECONDS_LEFT) {
    $Finish = [math]::Max(0, [math]::Min($Finish, [long] $env:SCHEDULED_EVENT_SECONDS_LEFT - 20))
}
while ((Get-State) -eq 'Starting') { Start-Sleep -Seconds 1 }
if ((Get-State) -eq 'Started') {
    Set-Mark
    "$Pool has $Finish s for the requests that it is answering"
    $deadline = (Get-Date).AddSeconds($Finish)
    while (($busy = @(Get-WebRequest -AppPool $Pool).Count) -gt 0) {
        if ((Get-Date) -ge $deadline) {
            "$busy requests still run after $Finish s"
            break
        }
        Start-Sleep -Seconds 1
    }
    if ((Get-State) -eq 'Started') {
        Stop-WebAppPool -Name $Pool
        Set-Mark
    } else {   # by an administrator, meanwhile
        Remove-Item -LiteralPath $Mark
    }
}
while ((Get-State) -eq 'Stopping') { Start-Sleep -Seconds 1 }   # the hook's timeout ends it
if ((Get-State) -ne 'Stopped') { throw "expected the pool $Pool to be stopped; it is $(Get-State)" }
"$Pool is stopped"
