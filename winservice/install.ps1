#Requires -Version 5.1
#Requires -RunAsAdministrator
<#
.SYNOPSIS
Installs the agent with pip into a venv of its own, and as a Windows service. Run again, it brings both up to date.

.DESCRIPTION
Needs a Python 3.11 or newer that was installed for all users. What the service is (account, recovery actions,
dependencies) is decided by "scheduled-events-agent service install", which this script calls.

.PARAMETER Package
What pip installs: a folder with the source, a wheel, or a name.

.PARAMETER Path
Where the venv is. Below Program Files only administrators can change it, and what the service runs must be so.

.PARAMETER Options
Passed on to "service install", for example: -Options '--config', 'D:\agent\policy.yaml'

.PARAMETER NoStart
Do not start the service.
#>
[CmdletBinding()]
param(
    [string] $Package = (Split-Path -Parent $PSScriptRoot),
    [string] $Path = (Join-Path $env:ProgramFiles 'scheduled-events-agent'),
    [string[]] $Options = @(),
    [switch] $NoStart
)
$ErrorActionPreference = 'Stop'

function Invoke-Checked([string] $Program, [string[]] $Arguments) {
    & $Program @Arguments
    if ($LASTEXITCODE -ne 0) { throw "$Program $Arguments failed with exit code $LASTEXITCODE" }
}

$python = Join-Path $Path 'Scripts\python.exe'
if (Test-Path $python) {
    # Files of a service that runs cannot be replaced. No service at all is no obstacle.
    if (Get-Service ScheduledEventsAgent -ErrorAction SilentlyContinue) {
        Invoke-Checked $python @('-I', '-m', 'agent', 'service', 'stop')
    }
} else {
    Invoke-Checked 'py' @('-3', '-m', 'venv', $Path)
}
Invoke-Checked $python @('-m', 'pip', 'install', '--upgrade', $Package)
Invoke-Checked $python (@('-I', '-m', 'agent', 'service', 'install') + $Options)
if (-not $NoStart) {
    Invoke-Checked $python @('-I', '-m', 'agent', 'service', 'start')
}
