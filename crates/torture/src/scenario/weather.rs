//! Faults that lie over everything: a thread has them begin and end at their times.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Injection, Place, Strike, What};
use crate::Host;
use crate::clock::Instant;
use crate::lab::lock;
use crate::lab::strain::{FullDisk, NoMemory, SlowDisk};
use crate::lab::wire::{Done, Weather};

/// Between two looks at the clock.
const TURN: Duration = Duration::from_millis(2);

/// What the owner and the thread share.
#[derive(Debug, Default)]
pub(super) struct Sky {
    stop: AtomicBool,
    /// Who has the guest.
    pub(super) primary: AtomicUsize,
    /// Who could take over.
    pub(super) spare: AtomicUsize,
    /// Weather that is over.
    past: Mutex<Vec<Injection>>,
}

/// The thread.
pub(super) struct Forecast {
    pub(super) sky: Arc<Sky>,
    thread: Option<JoinHandle<()>>,
}

/// Weather at some hosts, as it is.
struct Front {
    strike: Strike,
    begun: Instant,
    hosts: Vec<usize>,
    before: u64,
    strains: Vec<Strain>,
}

enum Strain {
    Full(FullDisk),
    Slow(SlowDisk),
    Memory(NoMemory),
}

impl Forecast {
    /// Has weather come over these hosts; the last is the arbiter's. `begin` is instant 0.
    pub(super) fn start(begin: Instant, strikes: Vec<Strike>, hosts: Vec<Arc<Host>>) -> Forecast {
        let sky = Arc::new(Sky::default());
        sky.spare.store(1, Ordering::Relaxed);
        let of = Arc::clone(&sky);
        let thread = std::thread::spawn(move || watch(begin, strikes, &hosts, &of));
        Forecast { sky, thread: Some(thread) }
    }

    /// Clears up; what the weather was.
    pub(super) fn end(mut self) -> Vec<Injection> {
        self.stop();
        std::mem::take(&mut lock(&self.sky.past))
    }

    fn stop(&mut self) {
        self.sky.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What it has seen is kept.
            let _ = thread.join();
        }
    }
}

impl Drop for Forecast {
    fn drop(&mut self) {
        self.stop();
    }
}

fn watch(begin: Instant, strikes: Vec<Strike>, hosts: &[Arc<Host>], sky: &Sky) {
    let mut coming = strikes.into_iter().peekable();
    let mut fronts: Vec<Front> = Vec::new();
    while !sky.stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        let passed = now.since(begin);
        let mut has_changed = false;
        while let Some(strike) = coming.next_if(|strike| strike.at <= passed) {
            fronts.push(Front::begin(strike, hosts, sky));
            has_changed = true;
        }
        let (over, on): (Vec<_>, Vec<_>) =
            fronts.drain(..).partition(|front| front.begun + front.strike.span <= now);
        fronts = on;
        if has_changed || !over.is_empty() {
            blow(&fronts, hosts);
        }
        let past = over.into_iter().map(|front| front.end(hosts));
        lock(&sky.past).extend(past.collect::<Vec<_>>());
        std::thread::sleep(TURN);
    }
    blow(&[], hosts);
    let past: Vec<_> = fronts.into_iter().map(|front| front.end(hosts)).collect();
    lock(&sky.past).extend(past);
}

/// Sets all wires to what the fronts over them do together.
fn blow(fronts: &[Front], hosts: &[Arc<Host>]) {
    for (index, host) in hosts.iter().enumerate() {
        let over = fronts.iter().filter(|front| front.hosts.contains(&index));
        let sum = over.fold(Weather::default(), |sum, front| match front.strike.what {
            What::Wire(more) => Weather {
                delay: sum.delay + more.delay,
                jitter: sum.jitter + more.jitter,
                loss: sum.loss.max(more.loss),
                reorder: sum.reorder.max(more.reorder),
                duplicate: sum.duplicate.max(more.duplicate),
                corrupt: sum.corrupt.max(more.corrupt),
            },
            _ => sum,
        });
        if let Some(wire) = host.wire().filter(|wire| wire.weather() != sum) {
            wire.set(sum);
        }
    }
}

/// How often wires have done what this weather asks for.
fn harm(weather: &Weather, done: &Done) -> u64 {
    let parts = [
        (!(weather.delay + weather.jitter).is_zero(), &done.delayed),
        (weather.loss > 0.0, &done.lost),
        (weather.reorder > 0.0, &done.reordered),
        (weather.duplicate > 0.0, &done.duplicated),
        (weather.corrupt > 0.0, &done.corrupted),
    ];
    let wanted = parts.iter().filter(|(is_wanted, _)| *is_wanted);
    wanted.map(|(_, count)| count.load(Ordering::Relaxed)).sum()
}

impl Front {
    fn begin(strike: Strike, hosts: &[Arc<Host>], sky: &Sky) -> Front {
        let arbiter = hosts.len() - 1;
        let over = match strike.to {
            Place::Primary | Place::Either => vec![sky.primary.load(Ordering::Relaxed)],
            Place::Spare => vec![sky.spare.load(Ordering::Relaxed)],
            Place::Arbiter => vec![arbiter],
            Place::All => (0..arbiter).collect(),
        };
        let strain = |index: &usize| {
            let host = &hosts[*index];
            match strike.what {
                What::FullDisk => Some(Strain::Full(FullDisk::fill(host))),
                What::SlowDisk(late) => Some(Strain::Slow(SlowDisk::brake(host, late))),
                What::Memory => Some(Strain::Memory(NoMemory::take(host))),
                _ => None,
            }
        };
        let strains = over.iter().filter_map(strain).collect();
        let begun = Instant::now();
        let mut front = Front { strike, begun, hosts: over, before: 0, strains };
        front.before = front.count(hosts);
        front
    }

    fn count(&self, hosts: &[Arc<Host>]) -> u64 {
        let What::Wire(weather) = self.strike.what else { return 0 };
        let wires = self.hosts.iter().filter_map(|index| hosts[*index].wire());
        wires.map(|wire| harm(&weather, wire.done())).sum()
    }

    fn end(self, hosts: &[Arc<Host>]) -> Injection {
        let harmed = self.count(hosts).saturating_sub(self.before);
        let names: Vec<_> = self.hosts.iter().map(|index| hosts[*index].name()).collect();
        let names = names.join(", ");
        let (count, words) = match self.strike.what {
            What::Wire(_) => (harmed, format!("{harmed} frames at {names}")),
            _ => {
                let ends = self.strains.into_iter().map(|strain| match strain {
                    Strain::Full(full) => full.end(),
                    Strain::Slow(slow) => slow.end(),
                    Strain::Memory(memory) => memory.end(),
                });
                let ends: Vec<(u64, String)> = ends.collect();
                let words: Vec<_> = ends.iter().map(|(_, words)| &**words).collect();
                (ends.iter().map(|end| end.0).sum(), format!("{} at {names}", words.join(", ")))
            }
        };
        Injection {
            strike: self.strike,
            at: self.begun,
            until: Instant::now(),
            count,
            proof: words,
            seen: None,
            answered: None,
            unprotected: None,
        }
    }
}
