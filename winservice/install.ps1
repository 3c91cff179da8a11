#Requires -Version 5.1
#Requires -RunAsAdministrator
<#
.SYNOPSIS
Installs the agent with pip into a venv of its own, and as a Windows service. Run again, it brings both up to date: it waits
until no hook runs, and leaves the service alone if pip has nothing to replace and no other option is given.

.DESCRIPTION
Needs a Python 3.11 or newer that was installed for all users. What the service is (recovery actions, dependencies) is
decided by "scheduled-events-agent service install", which this script calls.

.PARAMETER Package
What pip installs: a folder with the source, a wheel, or a name.

.PARAMETER Path
Where the venv is. Below Program Files only administrators can change it, and what the service runs must be so.

.PARAMETER Python
The Python that makes the venv, if there is none yet: by default the one that the launcher "py" takes for the newest.

.PARAMETER Config
The service's policy file, if it is not the one below ProgramData. Name it each time, as the next two.

.PARAMETER StateDir
Where the service keeps its state, if it is not below ProgramData.

.PARAMETER Account
What the service runs as, instead of LocalSystem: its own account "NT SERVICE\ScheduledEventsAgent", or a group managed
service account (DOMAIN\NAME$). Without it, an installed service keeps its account.

.PARAMETER NoStart
Do not start the service.

.EXAMPLE
powershell.exe -ExecutionPolicy Bypass -File .\winservice\install.ps1 -Config D:\agent\policy.yaml
#>
[CmdletBinding()]
param(
    [string] $Package = (Split-Path -Parent $PSScriptRoot),
    [string] $Path = (Join-Path $env:ProgramFiles 'scheduled-events-agent'),
    [string] $Python = 'py',
    [string] $Config,
    [string] $StateDir,
    [string] $Account,
    [switch] $NoStart
)
$ErrorActionPreference = 'Stop'

function Invoke-Checked([string] $Program, [string[]] $Arguments) {
    $found = (Get-Command $Program -CommandType Application | Select-Object -First 1).Source
    # With its streams redirected, PowerShell 5.1 takes a program's warnings for errors; its exit code counts.
    $ErrorActionPreference = 'Continue'
    & $found @Arguments
    if ($LASTEXITCODE -ne 0) { throw "$found $Arguments failed with exit code $LASTEXITCODE" }
}

if ($Account -and $Account -ne 'NT SERVICE\ScheduledEventsAgent' -and $Account -notlike '*\*$') {
    throw "-Account ${Account}: expected an account without a password, which are 'NT SERVICE\ScheduledEventsAgent' and " +
        'group managed service accounts (DOMAIN\NAME$)'
}
$service = Get-CimInstance Win32_Service -Filter "Name='ScheduledEventsAgent'"
if ($service -and $service.PathName -like '* -I -m scheduled_events_agent service host*') {
    throw "the service does not run from a venv, but most likely from the MSI: remove it first (msiexec /x)"
}
$venv = Join-Path $Path 'Scripts\python.exe'
$isRunning = $service -and $service.State -eq 'Running' -and (Test-Path -LiteralPath $venv)
if ($isRunning -and -not ($Config -or $StateDir -or $Account)) {
    # Of a folder pip always says that it would install it, for it cannot tell what is new there.
    $plan = Invoke-Checked $venv @('-I', '-m', 'pip', 'install', '--dry-run', '--upgrade', $Package)
    if (-not ($plan -match '^Would install')) { Write-Output 'the service is up to date'; return }
}
if ($isRunning) {
    # A stop cuts off hooks that run for longer than a minute, and they would begin again.
    $asked = @('-I', '-m', 'scheduled_events_agent', 'status', '--json')
    if ($Config) { $asked += "--config=$Config" }
    if ($StateDir) { $asked += "--state-dir=$StateDir" }
    $hooks = {
        $status = & $venv @asked | Out-String | ConvertFrom-Json
        @($status.on_clear) + @($status.events.hooks)
    }
    # Only a hook that runs, or waits for another run of itself, has the time since when.
    while (& $hooks | Where-Object { $_.since }) {
        Write-Output 'hooks are running; the service is stopped when they have ended'
        Start-Sleep -Seconds 10
    }
}
if ($service) {
    # The files of a running service cannot be replaced. Its process ends a little after the service.
    Stop-Service -Name ScheduledEventsAgent
    if ($service.ProcessId) { Wait-Process -Id $service.ProcessId -Timeout 30 -ErrorAction SilentlyContinue }
}
$options = @()
if ($Config) { $options += "--config=$Config" }
if ($StateDir) { $options += "--state-dir=$StateDir" }
try {
    if (-not (Test-Path -LiteralPath $venv)) {
        Invoke-Checked $Python @('-I', '-m', 'venv', $Path)
    }
    Invoke-Checked $venv @('-I', '-m', 'pip', 'install', '--upgrade', $Package)
    Invoke-Checked $venv (@('-I', '-m', 'scheduled_events_agent', 'service', 'install') + $options)
} catch {   # without a network, for one: the service goes on as it is
    if ($service -and $service.State -eq 'Running') { Start-Service -Name ScheduledEventsAgent -ErrorAction Continue }
    throw
}
if ($Account) {
    # The same lines are in docs/windows.md.
    $data = "$env:ProgramData\ScheduledEventsAgent"
    $privileges = 'SeChangeNotifyPrivilege/SeCreateGlobalPrivilege/SeImpersonatePrivilege'
    Invoke-Checked sc.exe @('config', 'ScheduledEventsAgent', 'obj=', $Account)
    Invoke-Checked sc.exe @('privs', 'ScheduledEventsAgent', $privileges)
    Invoke-Checked icacls.exe @($data, '/grant', "${Account}:(OI)(CI)RX")
    Invoke-Checked icacls.exe @("$data\hooks", '/grant', "${Account}:(OI)(CI)RX")
    Invoke-Checked icacls.exe @("$data\state", '/grant', "${Account}:(OI)(CI)F")
    Invoke-Checked icacls.exe @("$data\logs", '/grant', "${Account}:(OI)(CI)F")
}
if (-not $NoStart) {
    Invoke-Checked $venv @('-I', '-m', 'scheduled_events_agent', 'service', 'start')
}
