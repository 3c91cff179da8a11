# Desired State Configuration: the MSI, the policy, the running service.
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
    }
}
