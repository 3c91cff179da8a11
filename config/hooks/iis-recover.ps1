#Requires -Version 5.1
<#
.SYNOPSIS
Starts the application pool of IIS that iis-prepare.ps1 has stopped, and ends when its site answers: a recover hook, and
one for on_clear.

.DESCRIPTION
Needs the feature Web-Scripting-Tools (Install-WindowsFeature), and an administrator; the agent's service is one. May run
again at any time: a pool that is started is as it should be, and one that an administrator stopped before the event is left
as it is. Until the event is over, one stopped since is started again: to keep it stopped, remove the mark. One that is just
stopping (the event was canceled in the middle of iis-prepare.ps1) is waited for first.

Exit code 0: the pool is started and the site answers, or the pool was not stopped by iis-prepare.ps1. 1: an error, which
the log shows.

.PARAMETER Pool
The application pool.

.PARAMETER WarmUp
An address of the site, such as http://localhost/. It is asked until the answer is 2xx or 3xx; the hook's timeout ends
that. A redirect is not followed, for it may lead to another VM. Without an address, the pool counts as ready when it is
started, and the first clients wait for the application.

.PARAMETER Mark
As for iis-prepare.ps1.
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory)] [string] $Pool,
    [string] $WarmUp = '',
    [string] $Mark = "$env:ProgramData\ScheduledEventsAgent\state\$([uri]::EscapeDataString($Pool)).stopped-by-agent"
)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'

if (-not (Test-Path -LiteralPath $Mark)) {
    'not stopped by iis-prepare.ps1: left as it is'
    exit 0
}
. "$PSScriptRoot\iis-common.ps1"

function Test-Mark {   # not if an administrator has started the pool since: then the mark is void
    $id, $count = (@(Get-Content -LiteralPath $Mark) + '', '')[0, 1]
    $now = "$(Get-WorkerCount)"
    ($id -and $id -eq $env:SCHEDULED_EVENT_ID) -or -not $count -or $now -in '', '0' -or $now -eq $count
}

# After a boot, IIS may still be starting.
$iis = Get-Service -Name W3SVC
if ($iis.Status -ne 'Running') { Start-Service -InputObject $iis }
$iis.WaitForStatus('Running', [TimeSpan]::FromMinutes(1))

while ((Get-State) -eq 'Stopping') { Start-Sleep -Seconds 1 }   # the hook's timeout ends it
if ((Get-State) -eq 'Stopped') {
    if (-not (Test-Mark)) {
        Remove-Item -LiteralPath $Mark
        "$Pool was started and stopped since then: left as it is"
        exit 0
    }
    Start-WebAppPool -Name $Pool
}
while ((Get-State) -eq 'Starting') { Start-Sleep -Seconds 1 }
if ((Get-State) -ne 'Started') { throw "expected the pool $Pool to be started; it is $(Get-State)" }
while ($WarmUp) {
    try {
        $request = [System.Net.WebRequest]::Create($WarmUp)
        $request.Timeout = 60000
        $request.AllowAutoRedirect = $false
        $answer = $request.GetResponse()   # an error from 400 on
        "$WarmUp answers: $([int] $answer.StatusCode)"
        $answer.Close()
        break
    } catch {
        "$WarmUp does not answer yet: $($_.Exception.Message)"
        Start-Sleep -Seconds 5
    }
}
Remove-Item -LiteralPath $Mark
"$Pool is started"
