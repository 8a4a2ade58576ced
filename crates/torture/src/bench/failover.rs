//! `cargo xtask bench failover`: how long clients wait when something dies, part by part.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::Serialize;

use super::{PauseBench, make_bed, start_load};
use crate::chain::signal_redis;
use crate::clients::{Outcome, Reply};
use crate::clock::{Instant, millis};
use crate::demo::outage;
use crate::lab::LabError;
use crate::protected::{Engine, Failover, HANG};

/// Who dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The primary's host, at once, without a word.
    Host,
    /// `hotspare run`.
    Agent,
    /// The guest.
    Guest,
}

impl Victim {
    const NAMED: [(&str, Self); 3] =
        [("host", Self::Host), ("agent", Self::Agent), ("guest", Self::Guest)];
}

impl FromStr for Victim {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::NAMED.iter().find(|(known, _)| *known == name);
        named.map(|(_, victim)| *victim).ok_or_else(|| "host, agent or guest".to_owned())
    }
}

impl fmt::Display for Victim {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMED.iter().find(|(_, victim)| victim == self);
        to.write_str(named.map_or("nobody", |(name, _)| name))
    }
}

/// One failover.
#[derive(Clone, Debug)]
pub struct FailoverBench {
    /// The Redis and its load.
    pub bed: PauseBench,
    /// Who dies.
    pub victim: Victim,
}

/// What it took.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FailoverResult {
    /// As the spare tells it.
    pub failover: Failover,
    /// The longest time without a reply around the death, as clients see it.
    pub outage_ms: f64,
    /// Requests without a good reply.
    pub failed: usize,
}

/// Kills under load, in a lab of its own.
pub fn failover(bench: &FailoverBench) -> Result<FailoverResult, LabError> {
    let bed = make_bed(&bench.bed)?;
    let load = start_load(&bench.bed, &bed.lab, bench.bed.rate_per_s);
    (Instant::now() + bench.bed.length).sleep_until();
    let death = match bench.victim {
        Victim::Host => bed.lab.host(0).kill()?,
        Victim::Agent => {
            let death = Instant::now();
            bed.primary.signal(Signal::SIGKILL)?;
            death
        }
        Victim::Guest => {
            let death = Instant::now();
            signal_redis(&bed.primary, Signal::SIGKILL);
            death
        }
    };
    let spare = bed.spare.as_ref().expect("a failover is measured with a spare");
    let (failover, _) = Engine::taken_over(spare)?;
    load.answered_after(death, HANG);
    (Instant::now() + Duration::from_millis(300)).sleep_until();
    let mut replies: Vec<Reply> = load.finish().into_iter().flat_map(|lane| lane.replies).collect();
    replies.sort_by_key(|reply| reply.done);
    let failed = replies.iter().filter(|reply| reply.outcome != Outcome::Good).count();
    let (last, first) = outage(&replies, death)
        .ok_or(LabError::Deadline { what: "a reply after the death".into(), waited: HANG })?;
    Ok(FailoverResult { failover, outage_ms: millis(first.since(last)), failed })
}
