//! A spare looks for a primary: the one it was told of, or the one that it has heard of since.

use std::time::{Duration, Instant};

use hotspare_replica::{Channel, HostRole};

use crate::agent::Agent;
use crate::alike::Attempts;
use crate::spare;

const AGAIN: Duration = Duration::from_millis(300);
/// How often to look whether there is somebody to dial.
const LOOK: Duration = Duration::from_millis(20);
/// A ghost that stood for so long was a good one.
const GOOD: Duration = Duration::from_secs(30);
const BACK_OFF_MAX: Duration = Duration::from_secs(30);

/// When a spare whose ghosts get lost may have the next one.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackOff {
    lost: u32,
    joined: Option<Instant>,
    until: Option<Instant>,
}

impl BackOff {
    /// A ghost is about to be built.
    pub fn joined(&mut self, now: Instant) {
        self.joined = Some(now);
    }

    /// The ghost is lost. The first time a new one is wanted at once.
    pub fn lost(&mut self, now: Instant) {
        let good = self.joined.is_none_or(|joined| now.saturating_duration_since(joined) > GOOD);
        self.lost = if good { 1 } else { self.lost + 1 };
        let wait = match self.lost {
            1 => Duration::ZERO,
            times => Duration::from_millis(250) * 2u32.saturating_pow(times.min(10)),
        };
        self.until = Some(now + wait.min(BACK_OFF_MAX));
    }

    /// How long no ghost is wanted; nothing if one is.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

/// Dials primaries while this host is a spare that follows nobody. `told` is what the operator
/// gave; a primary that was heard of since comes first.
pub fn keep_joining(agent: &Agent, told: Option<String>) -> anyhow::Result<()> {
    let agent = agent.clone();
    std::thread::Builder::new().name("joiner".into()).spawn(move || {
        let mut attempts = Attempts::new();
        while agent.face().role == HostRole::Spare {
            let heard_of = agent.face().join.map(|address| address.to_string());
            for address in heard_of.iter().chain(told.as_ref()) {
                if !agent.wants_primary() {
                    break;
                }
                let met = Channel::connect(address, &agent.security)
                    .map_err(anyhow::Error::from)
                    .and_then(|channel| spare::follow(&agent, channel));
                let (news, wait) = attempts.ended(met, AGAIN);
                if let Some(text) = news {
                    agent.reporter.note(&format!("primary {address}: {text}; trying again"));
                }
                std::thread::sleep(wait);
            }
            std::thread::sleep(LOOK);
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_loss_costs_nothing_and_many_in_a_row_some_time() {
        let start = Instant::now();
        let mut back_off = BackOff::default();
        back_off.joined(start);
        back_off.lost(start);
        assert_eq!(back_off.wait(start), None);
        let mut before = Duration::ZERO;
        for _ in 0..5 {
            back_off.joined(start);
            back_off.lost(start);
            let wait = back_off.wait(start).expect("a pause");
            assert!(wait > before && wait <= BACK_OFF_MAX);
            before = wait;
        }
        back_off.joined(start);
        let later = start + GOOD * 2;
        back_off.lost(later);
        assert_eq!(back_off.wait(later), None, "it had been good for long");
    }
}
