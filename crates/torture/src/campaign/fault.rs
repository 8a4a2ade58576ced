//! What is done to hosts, agents and links.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::agents::Agents;
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::lab::LabError;

/// A sort of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The primary dies.
    Kill,
    /// The spare dies.
    SpareKill,
    /// A link is cut, and mended.
    Cut,
    /// An agent is stopped (SIGSTOP), and goes on.
    Stop,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Kill, Kind::SpareKill, Kind::Cut, Kind::Stop];
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Kill => "kill of the primary",
            Kind::SpareKill => "kill of the spare",
            Kind::Cut => "cut link",
            Kind::Stop => "stopped agent",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Primary,
    Spare,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Death {
    /// The cable, then all processes.
    Host,
    /// All processes; the kernel lives and says so to everybody.
    Processes,
    /// The agent alone.
    Agent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Primary,
    Spare,
    Arbiter,
}

/// A fault, as drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Kill(Part, Death),
    /// From one end to the other, and back if `both`.
    Cut {
        from: End,
        to: End,
        both: bool,
        span: Duration,
    },
    Stop(Part, Duration),
}

impl Fault {
    /// Draws one.
    pub(super) fn draw(kind: Kind, dice: &mut Dice) -> Fault {
        match kind {
            Kind::Kill => Fault::Kill(Part::Primary, draw_death(dice)),
            Kind::SpareKill => Fault::Kill(Part::Spare, draw_death(dice)),
            Kind::Cut => {
                let (from, to) = match dice.below(10) {
                    0..=3 => (End::Primary, End::Spare),
                    4..=6 => (End::Spare, End::Primary),
                    7 => (End::Primary, End::Arbiter),
                    8 => (End::Arbiter, End::Primary),
                    _ => (End::Spare, End::Arbiter),
                };
                let both = dice.chance(0.4);
                Fault::Cut { from, to, both, span: draw_span(dice, 3000) }
            }
            Kind::Stop => {
                let part = if dice.chance(0.5) { Part::Primary } else { Part::Spare };
                Fault::Stop(part, draw_span(dice, 3000))
            }
        }
    }

    /// How long it lasts, if it can be undone.
    pub(super) fn span(self) -> Option<Duration> {
        match self {
            Fault::Kill(..) => None,
            Fault::Cut { span, .. } | Fault::Stop(_, span) => Some(span),
        }
    }

    /// Does it; says when, and how to undo it.
    pub(super) fn strike(self, agents: &mut Agents) -> Result<(Instant, Undo), LabError> {
        let Some(primary) = agents.primary() else {
            let what = "a primary".to_owned();
            return Err(LabError::Deadline { what, waited: Duration::ZERO });
        };
        let index = |part: Part| if part == Part::Primary { primary } else { 1 - primary };
        match self {
            Fault::Kill(part, death) => {
                let at = match death {
                    Death::Host => agents.kill_host(index(part))?,
                    Death::Processes => agents.kill_processes(index(part))?,
                    Death::Agent => agents.kill_agent(index(part))?,
                };
                Ok((at, Undo::Nothing))
            }
            Fault::Stop(part, _) => {
                let at = Instant::now();
                agents.agent(index(part)).signal(Signal::SIGSTOP)?;
                Ok((at, Undo::Continue(index(part))))
            }
            Fault::Cut { from, to, both, .. } => {
                let host = |end: End| match end {
                    End::Primary => agents.host(primary),
                    End::Spare => agents.host(1 - primary),
                    End::Arbiter => agents.arbiter(),
                };
                let (from, to) = (host(from), host(to));
                let at = Instant::now();
                agents.lab.cut(from, to)?;
                if both {
                    agents.lab.cut(to, from)?;
                }
                Ok((at, Undo::Heal))
            }
        }
    }
}

/// What takes a fault back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undo {
    Nothing,
    Continue(usize),
    Heal,
}

impl Undo {
    pub(super) fn undo(self, agents: &Agents) -> Result<(), LabError> {
        match self {
            Undo::Nothing => Ok(()),
            Undo::Continue(index) => agents.agent(index).signal(Signal::SIGCONT),
            Undo::Heal => agents.lab.heal().map(drop),
        }
    }
}

fn draw_death(dice: &mut Dice) -> Death {
    match dice.below(4) {
        0..=1 => Death::Host,
        2 => Death::Processes,
        _ => Death::Agent,
    }
}

/// From 20 ms on; short ones are as likely as long ones.
fn draw_span(dice: &mut Dice, most_ms: u64) -> Duration {
    let most = (most_ms as f64 / 20.0).ln();
    let part = dice.below(1001) as f64 / 1000.0;
    Duration::from_secs_f64(0.020 * (most * part).exp())
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Part::Primary { "primary" } else { "spare" })
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = |end: End| match end {
            End::Primary => "primary",
            End::Spare => "spare",
            End::Arbiter => "arbiter",
        };
        match *self {
            Fault::Kill(part, Death::Host) => write!(f, "host of the {part} dies"),
            Fault::Kill(part, Death::Processes) => write!(f, "programs of the {part} die"),
            Fault::Kill(part, Death::Agent) => write!(f, "agent of the {part} dies"),
            Fault::Stop(part, span) => {
                write!(f, "agent of the {part} stands still for {:.0} ms", millis(span))
            }
            Fault::Cut { from, to, both, span } => {
                let arrow = if both { "<->" } else { "->" };
                write!(f, "no {}{arrow}{} for {:.0} ms", end(from), end(to), millis(span))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_drawn_from_end_to_end() {
        let mut dice = Dice::new(1);
        let spans: Vec<_> = (0..1000).map(|_| draw_span(&mut dice, 3000)).collect();
        let (least, most) = (Duration::from_millis(20), Duration::from_millis(3001));
        assert!(spans.iter().all(|span| (least..most).contains(span)));
        let short = spans.iter().filter(|span| **span < Duration::from_millis(245)).count();
        assert!((400..600).contains(&short), "{short}");
    }
}
