# Desired State Configuration: the MSI, the policy, the running service, and that this policy is in force.
# An empty ProductId accepts every installed version; for upgrades, name the MSI's product code.
Configuration ScheduledEventsAgent {
    Import-DscResource -ModuleName PSDesiredStateConfiguration
    Node localhost {
        Package Agent {
            Name      = 'Scheduled Events Agent'
            ProductId = ''
            Path      = '\\contoso.example\deploy\scheduled-events-agent-0.1.0-x64.msi'
            Arguments = 'START=0'
        }
        File Policy {
            SourcePath      = '\\contoso.example\deploy\policy.yaml'
            DestinationPath = 'C:\ProgramData\ScheduledEventsAgent\policy.yaml'
            Checksum        = 'SHA-256'
            MatchSource     = $true
            DependsOn       = '[Package]Agent'
        }
        Service Running {
            Name        = 'ScheduledEventsAgent'
            State       = 'Running'
            StartupType = 'Automatic'
            DependsOn   = '[File]Policy'
        }
        Script InForce {
            # Reloads a changed policy; its output names the keys that need a restart. A bad file fails here, and the policy
            # from before stays in force.
            DependsOn  = '[Service]Running'
            GetScript  = { @{ Result = '' } }
            TestScript = {
                $agent = "$env:ProgramFiles\Scheduled Events Agent\bin\scheduled-events-agent.cmd"
                $status = & $agent status --json | Out-String | ConvertFrom-Json
                $status.policy.hash -eq (Get-FileHash "$env:ProgramData\ScheduledEventsAgent\policy.yaml").Hash
            }
            SetScript  = {
                $agent = "$env:ProgramFiles\Scheduled Events Agent\bin\scheduled-events-agent.cmd"
                & $agent service reload | ForEach-Object { Write-Verbose $_ }
                if ($LASTEXITCODE -ne 0) { throw "the policy is rejected: see scheduled-events-agent check" }
            }
        }
    }
}
