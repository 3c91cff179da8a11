#Requires -Version 5.1
<#
.SYNOPSIS
Writes a checkpoint in every database of SQL Server, so that recovery after a restart is short: a prepare hook.

.DESCRIPTION
Needs the module SqlServer, and a login for the service's account with db_owner. From version 22 on, the module wants a
certificate that it trusts; else add Encrypt = 'Optional' to $server. May run again at any time.

Exit code 0: every database that is online and writable here has a checkpoint. 1: an error, which the log shows.
#>
[CmdletBinding()]
param()
$ErrorActionPreference = 'Stop'
Import-Module SqlServer
$server = @{ServerInstance = 'localhost'}
$databases = Invoke-Sqlcmd @server -QueryTimeout 30 -Query "
    SELECT d.name FROM sys.databases d
    WHERE d.state_desc = 'ONLINE' AND d.is_read_only = 0 AND HAS_DBACCESS(d.name) = 1
      AND (d.replica_id IS NULL OR sys.fn_hadr_is_primary_replica(d.name) = 1)"
foreach ($database in $databases) {
    Invoke-Sqlcmd @server -Database $database.name -Query 'CHECKPOINT' -QueryTimeout 120
}
