#Requires -Version 5.1
<#
.SYNOPSIS
Fails an availability group of SQL Server over, if this server is its primary: a prepare hook.

.DESCRIPTION
For groups with manual failover. Before anything is changed it looks for a secondary with synchronous commit that is
connected, and of which every database can fail over without loss of data. Afterwards it waits until this server is a
secondary. May run again at any time. Not tried with a real SQL Server.

Needs the module SqlServer. The command is sent to the secondary that becomes the primary; there the service's account
(for LocalSystem, DOMAIN\VM$) needs a login with ALTER AVAILABILITY GROUP, here one with VIEW SERVER STATE.

Exit code 0: another server is the primary. 1: an error, such as no secondary that is ready; nothing was changed then.

.PARAMETER Group
The availability group.

.PARAMETER LimitSeconds
For the failover, and for this server to be a secondary after it.
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory)] [ValidatePattern('^[\w-]+$')] [string] $Group,
    [int] $LimitSeconds = 120
)
$ErrorActionPreference = 'Stop'
Import-Module SqlServer
function Get-Replica {
    Invoke-Sqlcmd -ServerInstance localhost -QueryTimeout 30 -Query "
        SELECT r.replica_server_name AS name, s.role_desc AS role, s.is_local,
               s.connected_state_desc AS connection, r.availability_mode_desc AS mode,
               (SELECT COUNT(*) FROM sys.dm_hadr_database_replica_cluster_states d
                WHERE d.replica_id = r.replica_id) AS databases,
               (SELECT COUNT(*) FROM sys.dm_hadr_database_replica_cluster_states d
                WHERE d.replica_id = r.replica_id AND d.is_failover_ready = 0) AS not_ready
        FROM sys.availability_groups g
        JOIN sys.availability_replicas r ON r.group_id = g.group_id
        JOIN sys.dm_hadr_availability_replica_states s ON s.replica_id = r.replica_id
        WHERE g.name = '$Group'"
}

$replicas = @(Get-Replica)
$here = $replicas | Where-Object { $_.is_local }
if (-not $here) { throw "this server has no availability group $Group; nothing was changed" }
if ($here.role -ne 'PRIMARY') { 'not the primary'; exit 0 }
$next = $replicas | Where-Object {
    $_.role -eq 'SECONDARY' -and $_.mode -eq 'SYNCHRONOUS_COMMIT' -and $_.connection -eq 'CONNECTED' -and
    $_.databases -gt 0 -and $_.not_ready -eq 0
} | Select-Object -First 1
if (-not $next) { throw 'no secondary is ready without loss of data; nothing was changed' }
"failing over to $($next.name)"
Invoke-Sqlcmd -ServerInstance $next.name -Query "ALTER AVAILABILITY GROUP [$Group] FAILOVER" -QueryTimeout $LimitSeconds
$watch = [Diagnostics.Stopwatch]::StartNew()
while ((Get-Replica | Where-Object { $_.is_local }).role -ne 'SECONDARY') {
    if ($watch.Elapsed.TotalSeconds -ge $LimitSeconds) { throw 'this server is not a secondary yet' }
    Start-Sleep -Milliseconds 500
}
"$($next.name) is the primary now"
