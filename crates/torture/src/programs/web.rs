//! Web servers: every body is byte for byte what it should be.

use std::time::Duration;

use super::{Check, Ending, Findings, Stage, Watch, put};
use crate::Host;
use crate::clients::{HttpBody, HttpLane, Load, Pace};
use crate::clock::Instant;
use crate::lab::LabError;
use crate::protected::HANG;

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
        Ok(Box::new(WebWatch { pace, sessions, load: None }))
    }
}

struct WebWatch {
    pace: Pace,
    sessions: Vec<HttpLane>,
    load: Option<Load<HttpLane>>,
}

impl Watch for WebWatch {
    fn begin(&mut self, stage: &Stage) -> Result<(), LabError> {
        let sessions = std::mem::take(&mut self.sessions);
        let client = stage.lab.client();
        self.load = Some(Load::start(client, stage.service, self.pace, sessions, HANG));
        Ok(())
    }

    fn goes_on(&mut self, death: Instant) -> bool {
        self.load.as_ref().is_some_and(|load| load.answered_after(death, HANG))
    }

    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<Findings, LabError> {
        // Let it serve a while, so that damage that shows late has time to show.
        (Instant::now() + Duration::from_millis(500)).sleep_until();
        let lanes = self.load.map(Load::finish).unwrap_or_default();
        let good: u64 = lanes.iter().map(|lane| lane.session.good).sum();
        let reconnects: u64 = lanes.iter().map(|lane| lane.reconnects).sum();
        let mut wrongs: Vec<String> =
            lanes.iter().flat_map(|lane| lane.wrongs.iter().cloned()).collect();
        if lanes.iter().any(|lane| !lane.closed) {
            wrongs.push("a lane got no reply in the end".to_owned());
        }
        if ending.death.is_none() && reconnects > 0 {
            wrongs.push(format!("{reconnects} connections broke though nobody was killed"));
        }
        Ok(Findings { facts: vec![format!("{good} bodies, {reconnects} reconnects")], wrongs })
    }
}
