//! Key-value servers: every key is a valid prefix of what was written to it.

use std::time::Duration;

use super::{Check, Ending, Findings, Stage, Watch};
use crate::Host;
use crate::clients::{Load, Pace, Protocol, StoreLane, StorePlan, verify};
use crate::clock::{Instant, millis};
use crate::lab::LabError;
use crate::protected::HANG;

/// Loads a store with a mix of reads and writes.
pub(super) struct StoreCheck {
    pub(super) protocol: Protocol,
    pub(super) keys: usize,
    pub(super) rate_per_s: f64,
}

impl Check for StoreCheck {
    fn prepare(&self, _host: &Host) -> Result<(), LabError> {
        Ok(())
    }

    fn rehearse(&self, stage: &Stage) -> Result<Box<dyn Watch>, LabError> {
        let plan = StorePlan {
            protocol: self.protocol,
            keys: self.keys,
            value_bytes: 64,
            writes: 0.3,
            seed: stage.seed,
        };
        let pace = Pace { rate_per_s: self.rate_per_s, ..stage.pace };
        Ok(Box::new(StoreWatch { pace, sessions: plan.sessions(pace.lanes), load: None }))
    }
}

struct StoreWatch {
    pace: Pace,
    sessions: Vec<StoreLane>,
    load: Option<Load<StoreLane>>,
}

impl Watch for StoreWatch {
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
        let verdict = verify(&lanes, ending.death);
        let requests: usize = lanes.iter().map(|lane| lane.replies.len()).sum();
        let reconnects: u64 = lanes.iter().map(|lane| lane.reconnects).sum();
        let mut facts = vec![
            format!("{requests} requests, {reconnects} reconnects"),
            format!("{} keys verified", verdict.keys_verified),
            format!("{} of {} writes lost", verdict.lost.len(), verdict.writes_acknowledged),
        ];
        let oldest = ending.death.and_then(|death| verdict.oldest_loss_before(death));
        if let Some(oldest) = oldest {
            facts.push(format!("oldest {:.0} ms before the death", millis(oldest)));
        }
        let mut wrongs = verdict.wrongs;
        let oldest_lost = verdict.lost.first().map(|loss| loss.acknowledged);
        if let (Some(covered), Some(lost)) = (ending.covered, oldest_lost)
            && lost < covered
        {
            let early = millis(covered.since(lost));
            wrongs
                .push(format!("a write acknowledged {early:.1} ms before the checkpoint is lost"));
        }
        if ending.death.is_none() && reconnects > 0 {
            wrongs.push(format!("{reconnects} connections broke though nobody was killed"));
        }
        Ok(Findings { facts, wrongs })
    }
}
