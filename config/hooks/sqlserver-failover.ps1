#Requires -Version 5.1
<#
.SYNOPSIS
Fails an availability group of SQL Server over, if this server is its primary: a prepare hook.

.DESCRIPTION
For groups with manual failover. Needs the module SqlServer. The command is sent to the secondary that becomes the
primary; there the service's account (for LocalSystem, DOMAIN\VM$) needs a login with ALTER AVAILABILITY GROUP.

Exit code 0: another server is the primary. 1: an error, such as no secondary that is synchronized.

.PARAMETER Group
The availability group.
#>
[CmdletBinding()]
param([Parameter(Mandatory)] [ValidatePattern('^[\w-]+$')] [string] $Group)
$ErrorActionPreference = 'Stop'
Import-Module SqlServer
$replicas = Invoke-Sqlcmd -ServerInstance localhost -Query "
    SELECT r.replica_server_name AS name, s.role_desc AS role, s.is_local,
           s.synchronization_health_desc AS health, r.availability_mode_desc AS mode
    FROM sys.availability_groups g
    JOIN sys.availability_replicas r ON r.group_id = g.group_id
    JOIN sys.dm_hadr_availability_replica_states s ON s.replica_id = r.replica_id
    WHERE g.name = '$Group'"
if (-not ($replicas | Where-Object { $_.is_local -and $_.role -eq 'PRIMARY' })) { 'not the primary'; exit 0 }
$next = $replicas | Where-Object {
    $_.role -eq 'SECONDARY' -and $_.health -eq 'HEALTHY' -and $_.mode -eq 'SYNCHRONOUS_COMMIT'
} | Select-Object -First 1
if (-not $next) { throw 'no secondary is ready without loss of data' }
Invoke-Sqlcmd -ServerInstance $next.name -Query "ALTER AVAILABILITY GROUP [$Group] FAILOVER" -QueryTimeout 120
