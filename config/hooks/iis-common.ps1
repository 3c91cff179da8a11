# What iis-prepare.ps1 and iis-recover.ps1 share: what they ask IIS about the application pool $Pool. Not a hook itself.
# Install it beside them.
Import-Module WebAdministration

function Set-Mark {   # whole or not at all: on a full disk the one before stays, and no empty one
    $part = "$Mark.$PID"
    try {
        "$env:SCHEDULED_EVENT_ID", "$(Get-WorkerCount)" | Set-Content -LiteralPath $part -Encoding ASCII
        Move-Item -LiteralPath $part -Destination $Mark -Force
    } catch {
        Remove-Item -LiteralPath $part -ErrorAction SilentlyContinue
        throw
    }
}

function Get-State { (Get-WebAppPoolState -Name $Pool).Value }

function Get-WorkerCount {   # since IIS was started; nothing if Windows does not count
    Get-CimInstance -ClassName Win32_PerfRawData_APPPOOLCountersProvider_APPPOOLWAS -ErrorAction SilentlyContinue |
        Where-Object { $_.Name -eq $Pool } | ForEach-Object { "$($_.TotalWorkerProcessesCreated)" }
}
