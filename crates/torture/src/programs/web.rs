//! Web servers: every body is byte for byte what it should be.

use super::load::Loaded;
use super::{Check, Ending, Findings, Stage, Watch, put};
use crate::Host;
use crate::clients::{HttpBody, HttpLane, Pace};
use crate::clock::Instant;
use crate::lab::LabError;

/// Gets one path again and again.
pub(super) struct WebCheck {
    /// Files to put on every host: name in the lab's directory, content.
    pub(super) files: Vec<(&'static str, Vec<u8>)>,
    pub(super) path: &'static str,
    pub(super) body: HttpBody,
}

impl Check for WebCheck {
    fn prepare(&self, host: &Host) -> Result<(), LabError> {
        self.files.iter().try_for_each(|(name, content)| put(host, name, content))
    }

    fn rehearse(&self, stage: &Stage) -> Result<Box<dyn Watch>, LabError> {
        let pace = Pace { rate_per_s: 400.0, ..stage.pace };
        let sessions = vec![HttpLane::new(self.path, self.body.clone()); pace.lanes];
        Ok(Box::new(WebWatch(Loaded::new(pace, sessions))))
    }
}

struct WebWatch(Loaded<HttpLane>);

impl Watch for WebWatch {
    fn begin(&mut self, stage: &Stage) -> Result<(), LabError> {
        self.0.begin(stage);
        Ok(())
    }

    fn goes_on(&mut self, death: Instant) -> bool {
        self.0.goes_on(death)
    }

    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<Findings, LabError> {
        let lanes = self.0.finish();
        let good: u64 = lanes.iter().map(|lane| lane.session.good).sum();
        let reconnects: u64 = lanes.iter().map(|lane| lane.reconnects).sum();
        let mut wrongs: Vec<String> =
            lanes.iter().flat_map(|lane| lane.wrongs.iter().cloned()).collect();
        if lanes.iter().any(|lane| !lane.closed) {
            wrongs.push("a lane got no reply in the end".to_owned());
        }
        if ending.death.is_none() && reconnects > 0 {
            wrongs.push(format!("{reconnects} connections broke, which no client should see"));
        }
        Ok(Findings { facts: vec![format!("{good} bodies, {reconnects} reconnects")], wrongs })
    }
}
