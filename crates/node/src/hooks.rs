//! The operator's hook: told when this host becomes primary, and when it is no longer.

use std::time::Duration;

use hotspare_image::Term;
use hotspare_net::hook::{self, HookCall, HookEvent};

use crate::report::Reporter;
use crate::settings::Settings;

const PATIENCE: Duration = Duration::from_secs(10);

/// What the operator gave on the command line.
#[derive(Clone, Debug, Default)]
pub struct Hook {
    /// `--takeover-hook`.
    pub command: Option<String>,
    /// `--service-bridge`.
    pub bridge: Option<String>,
}

impl Hook {
    /// Runs the hook and waits for it; what goes wrong is told.
    pub fn run(&self, event: HookEvent, settings: &Settings, term: Term, reporter: &Reporter) {
        let Some(command) = &self.command else { return };
        let address = settings.service.map(|service| service.address.to_string());
        let call = HookCall {
            event,
            term,
            address: &address.unwrap_or_default(),
            guest: &settings.guest,
            interface: self.bridge.as_deref().unwrap_or_default(),
        };
        if let Err(error) = hook::run(command, &call, PATIENCE) {
            reporter.note(&error.to_string());
        }
    }

    /// Runs the hook beside everything else.
    pub fn spawn(&self, event: HookEvent, settings: &Settings, term: Term, reporter: &Reporter) {
        let (own, settings, reporter) = (self.clone(), settings.clone(), reporter.clone());
        let call = move || own.run(event, &settings, term, &reporter);
        let _ = std::thread::Builder::new().name("hook".into()).spawn(call);
    }
}
