//! Key-value servers: every key is a valid prefix of what was written to it.

use super::load::Loaded;
use super::{Check, Ending, Findings, Stage, Watch};
use crate::Host;
use crate::clients::{Pace, Protocol, StoreLane, StorePlan, verify};
use crate::clock::{Instant, millis};
use crate::lab::LabError;

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
        Ok(Box::new(StoreWatch(Loaded::new(pace, plan.sessions(pace.lanes)))))
    }
}

struct StoreWatch(Loaded<StoreLane>);

impl Watch for StoreWatch {
    fn begin(&mut self, stage: &Stage) -> Result<(), LabError> {
        self.0.begin(stage);
        Ok(())
    }

    fn goes_on(&mut self, death: Instant) -> bool {
        self.0.goes_on(death)
    }

    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<Findings, LabError> {
        let lanes = self.0.finish();
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
            wrongs.push(format!("{reconnects} connections broke, which no client should see"));
        }
        Ok(Findings { facts, wrongs })
    }
}
