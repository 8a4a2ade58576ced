//! What happens to a guest, and when, as somebody has written it down: hosts, load, faults at their
//! times or at random ones, and what clients may notice. `cargo xtask torture` reads the files.
//!
//! Two sorts of faults. *Blows* (a host dies, a link is cut) come one after the other, each when
//! the guest is protected again: the promise is that any one is survived. *Weather* (a slow
//! network, bytes that arrive wrong, a full disk) comes at its time and lies over everything.

mod blow;
pub mod minimise;
mod run;
mod weather;

use std::fmt;
use std::time::Duration;

use hotspare_kernel::kill_point::KillPoint;

use crate::clock::millis;
use crate::dice::Dice;
use crate::fleet::Pace;
use crate::lab::wire::Weather;

pub use self::run::{Injection, Report, run};

/// A scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// For people.
    pub name: String,
    /// As [`crate::campaign::PROGRAMS`] has them; each is run by itself.
    pub programs: Vec<&'static str>,
    /// That the guest runs on in turns; the arbiter has one of its own.
    pub hosts: usize,
    /// `timeline` or `output-commit`.
    pub guarantee: &'static str,
    /// Packets reach clients from the primary, not through a spare.
    pub is_direct: bool,
    /// Checkpoints are also stored, on the disk of the host.
    pub stores: bool,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// After so much silence a host counts as dead.
    pub silence: Duration,
    /// Decides whatever is random.
    pub seed: u64,
    /// Faults come in this time.
    pub duration: Duration,
    /// What clients do.
    pub load: Load,
    /// What happens.
    pub faults: Vec<Fault>,
    /// What may be noticed of it.
    pub invariants: Invariants,
}

/// What clients do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Connections that are held.
    pub connections: usize,
    /// Those that are made anew again and again.
    pub callers: usize,
    /// How hard they ask; nothing: now so, now so.
    pub pace: Option<Pace>,
}

/// A fault, or many alike.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// What is done.
    pub what: What,
    /// To whom.
    pub to: Place,
    /// When.
    pub when: When,
    /// The shortest and the longest time that it lasts, if it does not last for ever.
    pub span: (Duration, Duration),
}

/// When a fault comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// Once, so long after the begin.
    At(Duration),
    /// At random instants with this mean between two of them.
    Every(Duration),
}

/// Whom a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Who has the guest then.
    Primary,
    /// Who could take over.
    Spare,
    /// One of these two.
    Either,
    /// The arbiter's host.
    Arbiter,
    /// All but the arbiter's.
    All,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// The cable, then all processes.
    KillHost,
    /// All processes; the kernel lives and closes their connections.
    KillPrograms,
    /// The agent alone.
    KillAgent,
    /// All processes of the guest, while agent and host live.
    KillGuest,
    /// The agent stands still (SIGSTOP).
    Stop,
    /// All processes of the host stand still.
    Freeze,
    /// Nothing passes to this place any more, and back if `both`.
    Cut {
        /// The other end.
        to: Place,
        /// In both directions.
        both: bool,
    },
    /// The arbiter's process dies and comes back.
    KillArbiter,
    /// An agent dies at a certain point of its own code.
    KillPoint(KillPoint),
    /// The wire of the host treats frames like this.
    Wire(Weather),
    /// Each file that is opened on the host's disk takes so long.
    SlowDisk(Duration),
    /// The host's disk is full.
    FullDisk,
    /// The host has no more memory to give to agent and guest.
    Memory,
}

impl What {
    /// As files name it.
    pub fn kind(self) -> &'static str {
        match self {
            What::KillHost => "kill-host",
            What::KillPrograms => "kill-programs",
            What::KillAgent => "kill-agent",
            What::KillGuest => "kill-guest",
            What::Stop => "stop",
            What::Freeze => "freeze",
            What::Cut { .. } => "cut",
            What::KillArbiter => "kill-arbiter",
            What::KillPoint(_) => "kill-point",
            What::Wire(weather) if weather.corrupt > 0.0 => "corrupt",
            What::Wire(weather) if weather.duplicate > 0.0 => "duplicate",
            What::Wire(weather) if weather.reorder > 0.0 => "reorder",
            What::Wire(weather) if weather.loss > 0.0 => "loss",
            What::Wire(_) => "delay",
            What::SlowDisk(_) => "slow-disk",
            What::FullDisk => "full-disk",
            What::Memory => "memory",
        }
    }

    /// Whether it comes alone, when the guest is protected.
    pub fn is_blow(self) -> bool {
        !matches!(self, What::Wire(_) | What::SlowDisk(_) | What::FullDisk | What::Memory)
    }

    /// Whether it lasts for a time.
    pub fn lasts(self) -> bool {
        !matches!(
            self,
            What::KillHost
                | What::KillPrograms
                | What::KillAgent
                | What::KillGuest
                | What::KillPoint(_)
        )
    }

    /// Whether the host needs a disk of its own for it.
    pub fn is_of_disks(self) -> bool {
        matches!(self, What::SlowDisk(_) | What::FullDisk)
    }
}

/// What clients may notice: more than that is a failure. Nothing is no limit.
#[derive(Clone, Copy, Debug)]
pub struct Invariants {
    /// Connections that are reset, closed or refused.
    pub resets: Option<u64>,
    /// Wrong replies, and none in time.
    pub errors: Option<u64>,
    /// Acknowledged writes that are gone.
    pub lost: Option<u64>,
    /// Writes that were done twice.
    pub duplicates: Option<u64>,
    /// The longest time from a request to its reply; later is an error.
    pub wait: Duration,
    /// The histories of a Redis have an order in which they make sense.
    pub linearizable: bool,
}

impl Default for Invariants {
    /// Clients notice nothing but time.
    fn default() -> Self {
        let none = Some(0);
        Invariants {
            resets: none,
            errors: none,
            lost: none,
            duplicates: none,
            wait: crate::protected::HANG,
            linearizable: true,
        }
    }
}

/// One fault at its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Strike {
    /// The number of the fault in the scenario.
    pub fault: usize,
    /// What is done.
    pub what: What,
    /// To whom; never [`Place::Either`].
    pub to: Place,
    /// Not before so long after the begin.
    pub at: Duration,
    /// How long it lasts.
    pub span: Duration,
}

impl Scenario {
    /// All that happens, in order. The same seed gives the same.
    pub fn draw(&self) -> Vec<Strike> {
        let dice = Dice::new(self.seed);
        let mut strikes = Vec::new();
        for (number, fault) in self.faults.iter().enumerate() {
            let mut dice = dice.part(number as u64 + 1);
            let mut at = match fault.when {
                When::At(at) => at,
                When::Every(mean) => dice.between(Duration::ZERO, mean * 2),
            };
            while at < self.duration {
                let to = match fault.to {
                    Place::Either if dice.chance(0.5) => Place::Primary,
                    Place::Either => Place::Spare,
                    place => place,
                };
                let span = draw_span(&mut dice, fault.span).min(self.duration);
                strikes.push(Strike { fault: number, what: fault.what, to, at, span });
                let When::Every(mean) = fault.when else { break };
                at += dice.between(Duration::from_millis(1), mean * 2);
            }
        }
        strikes.sort_by_key(|strike| (strike.at, strike.fault));
        strikes
    }

    /// The same with exactly these faults.
    #[must_use]
    pub fn with(&self, strikes: &[Strike]) -> Scenario {
        let fault = |strike: &Strike| Fault {
            what: strike.what,
            to: strike.to,
            when: When::At(strike.at),
            span: (strike.span, strike.span),
        };
        Scenario { faults: strikes.iter().map(fault).collect(), ..self.clone() }
    }
}

/// Short spans are as likely as long ones.
fn draw_span(dice: &mut Dice, (least, most): (Duration, Duration)) -> Duration {
    if least >= most || least.is_zero() {
        return most;
    }
    let ratio = (most.as_secs_f64() / least.as_secs_f64()).ln();
    let part = dice.below(1001) as f64 / 1000.0;
    Duration::from_secs_f64(least.as_secs_f64() * (ratio * part).exp())
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Primary => "primary",
            Place::Spare => "spare",
            Place::Either => "either",
            Place::Arbiter => "arbiter",
            Place::All => "all",
        })
    }
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (to, span) = (self.to, millis(self.span));
        match self.what {
            What::KillHost => write!(f, "host of the {to} dies"),
            What::KillPrograms => write!(f, "programs of the {to} die"),
            What::KillAgent => write!(f, "agent of the {to} dies"),
            What::KillGuest => write!(f, "guest is killed"),
            What::Stop => write!(f, "agent of the {to} stands still for {span:.0} ms"),
            What::Freeze => write!(f, "host of the {to} stands still for {span:.0} ms"),
            What::Cut { to: end, both } => {
                let arrow = if both { "<->" } else { "->" };
                write!(f, "no {to}{arrow}{end} for {span:.0} ms")
            }
            What::KillPoint(point) => write!(f, "an agent dies at {}", point.name()),
            What::KillArbiter => write!(f, "arbiter is gone for {span:.0} ms"),
            What::Wire(weather) => write!(f, "wire of {to}: {weather} for {span:.0} ms"),
            What::SlowDisk(late) => {
                write!(f, "disk of {to} slower by {:.0} ms for {span:.0} ms", millis(late))
            }
            What::FullDisk => write!(f, "disk of {to} full for {span:.0} ms"),
            What::Memory => write!(f, "no memory left at {to} for {span:.0} ms"),
        }
    }
}

impl fmt::Display for Weather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = [
            (self.loss, "lost"),
            (self.reorder, "overtaken"),
            (self.duplicate, "twice"),
            (self.corrupt, "with a wrong bit"),
        ];
        let mut words = Vec::new();
        if !(self.delay + self.jitter).is_zero() {
            let most = millis(self.delay + self.jitter);
            words.push(format!("{:.0} to {most:.0} ms late", millis(self.delay)));
        }
        let shares = shares.iter().filter(|(share, _)| *share > 0.0);
        words.extend(shares.map(|(share, word)| format!("{:.2} % {word}", share * 100.0)));
        f.write_str(&words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn scenario(faults: Vec<Fault>) -> Scenario {
        Scenario {
            name: "test".to_owned(),
            programs: vec!["redis-server"],
            hosts: 2,
            guarantee: "output-commit",
            is_direct: false,
            stores: false,
            epoch: Duration::from_millis(100),
            silence: Duration::from_millis(90),
            seed: 7,
            duration: Duration::from_secs(100),
            load: Load { connections: 10, callers: 1, pace: None },
            faults,
            invariants: Invariants::default(),
        }
    }

    pub(super) fn stops(when: When) -> Fault {
        let span = (Duration::from_millis(20), Duration::from_secs(3));
        Fault { what: What::Stop, to: Place::Either, when, span }
    }

    #[test]
    fn a_seed_repeats_its_faults_and_they_come_at_their_rate() {
        let scenario = scenario(vec![
            stops(When::Every(Duration::from_secs(2))),
            stops(When::At(Duration::from_secs(50))),
        ]);
        let strikes = scenario.draw();
        assert_eq!(strikes, scenario.draw());
        assert!((35..70).contains(&strikes.len()), "{}", strikes.len());
        assert!(strikes.is_sorted_by_key(|strike| strike.at));
        assert!(strikes.iter().all(|strike| strike.to != Place::Either));
        let other = Scenario { seed: 8, ..scenario.clone() };
        assert_ne!(strikes, other.draw());
    }

    #[test]
    fn a_scenario_of_what_was_drawn_draws_the_same() {
        let scenario = scenario(vec![stops(When::Every(Duration::from_secs(5)))]);
        let strikes = scenario.draw();
        let again = scenario.with(&strikes).draw();
        assert_eq!(again.len(), strikes.len());
        let alike = |(one, other): (&Strike, &Strike)| {
            (one.what, one.to, one.at, one.span) == (other.what, other.to, other.at, other.span)
        };
        assert!(strikes.iter().zip(&again).all(alike));
    }
}
