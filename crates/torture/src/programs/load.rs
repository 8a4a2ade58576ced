//! The load that servers are watched under.

use std::time::Duration;

use super::Stage;
use crate::clients::{LaneRecord, Load, Pace, Session};
use crate::clock::Instant;
use crate::protected::HANG;

/// Sessions that begin together and are asked for records in the end.
pub(super) struct Loaded<S> {
    pace: Pace,
    sessions: Vec<S>,
    load: Option<Load<S>>,
}

impl<S: Session + 'static> Loaded<S> {
    pub(super) fn new(pace: Pace, sessions: Vec<S>) -> Self {
        Self { pace, sessions, load: None }
    }

    pub(super) fn begin(&mut self, stage: &Stage) {
        let sessions = std::mem::take(&mut self.sessions);
        let client = stage.lab.client();
        self.load = Some(Load::start(client, stage.service, self.pace, sessions, HANG));
    }

    pub(super) fn goes_on(&self, death: Instant) -> bool {
        self.load.as_ref().is_some_and(|load| load.answered_after(death, HANG))
    }

    /// The records, after a while in which damage that shows late has time to show.
    pub(super) fn finish(self) -> Vec<LaneRecord<S>> {
        (Instant::now() + Duration::from_millis(500)).sleep_until();
        self.load.map(Load::finish).unwrap_or_default()
    }
}
