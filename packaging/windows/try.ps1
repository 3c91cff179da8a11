#Requires -Version 5.1
#Requires -RunAsAdministrator
<#
.SYNOPSIS
Tries the MSI on a real Windows, for what Wine cannot show. It installs, breaks and removes things: for a machine that
is thrown away afterwards.

.DESCRIPTION
Ends with an error at the first thing that is not as it must be. The agent's own simulator takes the place of Azure.

.PARAMETER Msi
The MSI.

.PARAMETER Newer
The same, built with a higher version.

.EXAMPLE
powershell.exe -ExecutionPolicy Bypass -File packaging\windows\try.ps1 -Msi old.msi -Newer new.msi
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory)] [string] $Msi,
    [Parameter(Mandatory)] [string] $Newer
)
Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'

$name = 'ScheduledEventsAgent'
$product = Join-Path $env:ProgramFiles 'Scheduled Events Agent'
$command = Join-Path $product 'bin\scheduled-events-agent.cmd'
$installLog = Join-Path $product 'install.log'
$data = Join-Path $env:ProgramData $name
$policy = Join-Path $data 'policy.yaml'
$source = "HKLM:\SYSTEM\CurrentControlSet\Services\EventLog\Application\$name"
$Msi = (Resolve-Path $Msi).Path
$Newer = (Resolve-Path $Newer).Path
# With a space, as a test of quotes. It is not one of the agent's places: it exists before.
$work = Join-Path $env:ProgramFiles 'Trial of the agent'
$notes = Join-Path $work 'notes.txt'
$wait = Join-Path $work 'wait'

function Step([string] $What) { Write-Host "=== $What ($(Get-Date -Format T))" }

function Assert([string] $What, [bool] $Holds) {
    if (-not $Holds) { throw "expected: $What" }
    Write-Host "    $What"
}

function Start-Msi([string] $Arguments) {
    $script:log = Join-Path $work "$([guid]::NewGuid()).log"
    $process = Start-Process msiexec.exe -PassThru -ArgumentList "$Arguments /qn /l*v `"$log`""
    $null = $process.Handle   # or there is no exit code later
    $process
}

function Complete-Msi($Process, [int] $Expected) {
    $Process.WaitForExit()
    if ($Process.ExitCode -ne $Expected) {
        Get-Content $log -Tail 300 | Write-Host
        if (Test-Path $installLog) { Get-Content $installLog | Write-Host }
        throw "msiexec: expected exit code $Expected, found $($Process.ExitCode)"
    }
}

function Invoke-Msi([string] $Arguments, [int] $Expected = 0) {
    Complete-Msi (Start-Msi $Arguments) $Expected
}

function Get-Facts { Get-CimInstance Win32_Service -Filter "Name='$name'" }

function Wait-Until([string] $What, [scriptblock] $Test, [int] $Seconds = 90) {
    $deadline = (Get-Date).AddSeconds($Seconds)
    while (-not (& $Test)) {
        if ((Get-Date) -gt $deadline) {
            if (Test-Path "$data\logs\agent.log") { Get-Content "$data\logs\agent.log" -Tail 50 | Write-Host }
            throw "not within $Seconds s: $What"
        }
        Start-Sleep -Milliseconds 500
    }
    Write-Host "    $What"
}

function Get-Notes { if (Test-Path $notes) { @(Get-Content $notes) } else { @() } }

function Assert-SetUp {
    $recovery = sc.exe qfailure $name | Out-String
    $delays = [regex]::Matches($recovery, 'RESTART -- Delay = (\d+)') | ForEach-Object { $_.Groups[1].Value }
    Assert 'three restarts, after 5, 30 and 60 s' ("$delays" -eq '5000 30000 60000')
    Assert 'for an end with an error, too' ((sc.exe qfailureflag $name | Out-String) -match 'TRUE')
    Assert 'a service SID' ((sc.exe qsidtype $name | Out-String) -match 'UNRESTRICTED')
    Assert '90 s before a shutdown' ((sc.exe qpreshutdown $name | Out-String) -match '90000')
    Assert 'automatic, and not delayed' ((sc.exe qc $name | Out-String) -match 'AUTO_START\s*\r?\n')
}

New-Item -ItemType Directory -Force $work | Out-Null
Set-Content (Join-Path $work 'drain.ps1') @'
param([string] $Word)
$notes = Join-Path $PSScriptRoot 'notes.txt'
if (-not (Test-Path $notes)) { Add-Content $notes 'first attempt'; exit 3 }
Add-Content $notes "drain for $env:SCHEDULED_EVENT_TYPE, $Word"
while (Test-Path (Join-Path $PSScriptRoot 'wait')) { Start-Sleep -Milliseconds 200 }
Add-Content $notes 'drained'
'@
Set-Content (Join-Path $work 'resume.cmd') @'
@echo off
echo resume, %SCHEDULED_EVENT_OUTCOME%>> "%~dp0notes.txt"
'@
Set-Content (Join-Path $work 'my policy.yaml') @"
imds: {endpoint: 'http://127.0.0.1:8169', poll_interval: 250ms}
rules:
  - name: impactful
    when: {type: Reboot}
    prepare: [drain]
    recover: [resume]
    approve: when-prepared
hooks:
  drain: {run: ['$work\drain.ps1', 'two words'], attempts: 2, retry_delay: 1s, timeout: 5m}
  resume: {run: ['$work\resume.cmd']}
"@
Set-Content (Join-Path $work 'bad.yaml') 'rulez: []'

Step 'A directory that another account has made is not taken over'
New-Item -ItemType Directory $data | Out-Null
icacls.exe $data /setowner '*S-1-5-32-545' | Out-Null   # Users
Invoke-Msi "/i `"$Msi`"" 1603
Assert 'said why' ((Get-Content $installLog -Raw) -match 'expected a directory of an administrator')
Assert 'no service' ($null -eq (Get-Facts))
Remove-Item -Recurse $data

Step 'Install'
Invoke-Msi "/i `"$Msi`" POLICY=`"$work\my policy.yaml`""
Assert 'the service runs' ((Get-Facts).State -eq 'Running')
Assert 'as LocalSystem' ((Get-Facts).StartName -eq 'LocalSystem')
Assert-SetUp
Assert 'the policy is there' ((Get-FileHash $policy).Hash -eq (Get-FileHash "$work\my policy.yaml").Hash)
Assert 'the source is registered' ((Get-ItemProperty $source).EventMessageFile -eq "$product\messages.dll")
$started = Get-WinEvent -FilterHashtable @{LogName = 'Application'; ProviderName = $name; Id = 100} -MaxEvents 1
Assert 'the Event Log shows text' ($started.Message -match 'The agent started')
$version = & $command --version
Assert 'the command works' ($version -match '^scheduled-events-agent ')

Step 'Only administrators and the system may use its files'
$allowed = 'S-1-5-18', 'S-1-5-32-544'
foreach ($place in $data, "$data\hooks", "$data\state", "$data\logs", $policy, "$data\logs\agent.log") {
    $rules = (Get-Acl $place).GetAccessRules($true, $true, [System.Security.Principal.SecurityIdentifier])
    $others = @($rules | Where-Object { $_.IdentityReference.Value -notin $allowed })
    Assert "$place is closed to others" ($others.Count -eq 0 -and $rules.Count -gt 0)
}

Step 'A process that dies is started again'
$before = (Get-Facts).ProcessId
Stop-Process -Id $before -Force
Wait-Until 'another process runs' { $now = Get-Facts; $now.State -eq 'Running' -and $now.ProcessId -notin 0, $before }

Step 'An upgrade with a bad policy does not even stop the old version'
$before = (Get-Facts).ProcessId
Invoke-Msi "/i `"$Newer`" POLICY=`"$work\bad.yaml`"" 1603
Assert 'said why' ((Get-Content $installLog -Raw) -match 'unknown key "rulez"')
Assert 'the same process runs' ((Get-Facts).ProcessId -eq $before)

Step 'An upgrade that fails leaves all as it was'
New-Item -ItemType Directory "$policy.before" | Out-Null   # in the way of what is to be put there
Invoke-Msi "/i `"$Newer`" POLICY=`"$work\my policy.yaml`"" 1603
Remove-Item "$policy.before"
Wait-Until 'the old service runs' { (Get-Facts).State -eq 'Running' }
Assert 'the old version' ((& $command --version) -eq $version)
Assert-SetUp
Assert 'the old policy' ((Get-FileHash $policy).Hash -eq (Get-FileHash "$work\my policy.yaml").Hash)

Step 'An event, its hook failing once, and an upgrade that waits for the second attempt for more than 30 s'
New-Item $wait | Out-Null
# From a copy: an upgrade replaces these files, so they must not be in use.
Copy-Item -Recurse $product (Join-Path $work 'copy')
$simulator = Start-Process (Join-Path $work 'copy\bin\scheduled-events-agent.cmd') -PassThru -WindowStyle Hidden `
    -ArgumentList 'simulate platform-reboot --port 8169'
Wait-Until 'the hook runs for the second time' { @(Get-Notes).Count -eq 2 }
$held = (Get-Service -Name $name).ServiceHandle   # as a console does that shows it, so that it could not be deleted
$upgrade = Start-Msi "/i `"$Newer`""
Wait-Until 'the service got the command to stop' { (Get-Facts).State -eq 'Stop Pending' }
Start-Sleep -Seconds 35
Assert 'it waits for its hook' ((Get-Facts).State -eq 'Stop Pending' -and @(Get-Notes).Count -eq 2)
Remove-Item $wait
Complete-Msi $upgrade 0
$held.Dispose()
Wait-Until 'the service runs' { (Get-Facts).State -eq 'Running' }
Assert-SetUp
Wait-Until 'the machine is back' { @(Get-Notes).Count -eq 4 }
$expected = 'first attempt', 'drain for Reboot, two words', 'drained', 'resume, completed'
Assert ($expected -join '; ') (((Get-Notes) -join '; ') -eq ($expected -join '; '))
taskkill.exe /F /T /PID $simulator.Id | Out-Null
$ids = @(Get-WinEvent -FilterHashtable @{LogName = 'Application'; ProviderName = $name} | ForEach-Object { $_.Id })
foreach ($id in 200, 201, 221, 222, 231, 251) { Assert "id $id is in the Event Log" ($ids -contains $id) }
Get-WinEvent -FilterHashtable @{LogName = 'Application'; ProviderName = $name} |
    ForEach-Object { Write-Host $_.TimeCreated $_.Id ($_.Message -split "`n")[0] }

Step 'A repair takes nothing from the command line'
Set-Content (Join-Path $work 'other.yaml') 'rules: []'
Invoke-Msi "/fa `"$Newer`" START=0 POLICY=`"$work\other.yaml`" INSTALLDIR=`"$work\planted`""
Assert 'the service runs' ((Get-Facts).State -eq 'Running')
Assert 'it is where it was' ((Test-Path "$product\python\python.exe") -and -not (Test-Path "$work\planted"))
Assert 'the policy is kept' ((Get-FileHash $policy).Hash -eq (Get-FileHash "$work\my policy.yaml").Hash)

Step 'An older version is refused'
Invoke-Msi "/i `"$Msi`"" 1603
Assert 'the service runs' ((Get-Facts).State -eq 'Running')

Step 'Remove'
Invoke-Msi "/x `"$Newer`""
Assert 'no service' ($null -eq (Get-Facts))
Assert 'no source in the Event Log' (-not (Test-Path $source))
Assert 'no folder' (-not (Test-Path $product))
Assert 'nothing on the PATH' ([Environment]::GetEnvironmentVariable('Path', 'Machine') -notmatch 'Scheduled Events Agent')
Assert 'the policy is kept' (Test-Path $policy)

Step 'Elsewhere, upgraded, not started, and removed with all data'
$elsewhere = Join-Path $env:ProgramFiles 'Elsewhere'
Invoke-Msi "/i `"$Msi`" START=0 INSTALLDIR=`"$elsewhere`""
Invoke-Msi "/i `"$Newer`" START=0"
Assert 'it is where it was' ((Test-Path "$elsewhere\python\python.exe") -and -not (Test-Path $product))
Assert 'the service does not run' ((Get-Facts).State -eq 'Stopped')
Assert 'it starts with the machine' ((Get-Facts).StartMode -eq 'Auto')
Invoke-Msi "/x `"$Newer`" PURGE=1"
Assert 'no data' (-not (Test-Path $data))
Assert 'no folder' (-not (Test-Path $elsewhere))
exit 0   # whatever the last program above said
