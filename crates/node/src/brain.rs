//! The thread that decides: it owns the cluster's state machine, hears of everything that happens
//! and says what to do about it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use hotspare_cluster::register::Wish;
use hotspare_cluster::{Action, Event, Node, Role, granted_by_nobody};
use hotspare_net::lease::boot_ns;

use crate::agent::{Agent, Message};

/// Where events go.
#[derive(Clone)]
pub struct Brain(Sender<Event>);

impl Brain {
    /// Tells the brain. One that is gone does not care.
    pub fn tell(&self, event: Event) {
        let _ = self.0.send(event);
    }

    /// A brain that is told things before it thinks.
    pub fn new() -> (Self, Receiver<Event>) {
        let (sender, receiver) = channel();
        (Self(sender), receiver)
    }
}

/// Nanoseconds since the program began, on a clock that never goes back.
///
/// For a spare it stands still when the program does (a stopped process, a paused virtual machine):
/// what nobody listened for is not the primary's silence. A spare that took it for that would take
/// a guest over that lives, from a checkpoint of long ago. For a primary all time counts, since
/// leases do; that nobody listened for its spares it is told ([`Event::StoodStill`]).
struct Clock {
    began: Instant,
    stood_still: u64,
    /// A wait that takes so much longer than asked for: this host or program stood still.
    late_max: u64,
}

impl Clock {
    fn now(&self) -> u64 {
        (self.began.elapsed().as_nanos() as u64).saturating_sub(self.stood_still)
    }

    /// This time of `CLOCK_BOOTTIME`, by which leases are counted, on this clock.
    fn of_boot(&self, at: u64) -> u64 {
        let (now, boot_now) = (self.now(), boot_ns());
        match at {
            u64::MAX => at,
            _ if at >= boot_now => now.saturating_add(at - boot_now),
            _ => now.saturating_sub(boot_now - at),
        }
    }

    /// An event of the arbiter, with its times on this clock.
    fn localise(&self, event: Event) -> Event {
        match event {
            Event::TermGranted { term, until, heirs } => {
                Event::TermGranted { term, until: self.of_boot(until), heirs }
            }
            Event::TermDenied { term, held, retry_at } => {
                let retry_at = retry_at.map(|at| self.of_boot(at));
                Event::TermDenied { term, held, retry_at }
            }
            Event::LeaseExtended(until) => Event::LeaseExtended(self.of_boot(until)),
            other => other,
        }
    }

    /// A wait of `asked` has taken `took`: how long we stood still, if a primary is to know.
    fn waited(&mut self, asked: u64, took: u64, role: Role) -> Option<u64> {
        let late = took.saturating_sub(asked);
        match role {
            _ if late <= self.late_max => None,
            Role::Spare => {
                self.stood_still += late;
                None
            }
            Role::Primary => Some(late),
            _ => None,
        }
    }
}

/// Thinks until everybody who could tell it something is gone. A peer counts as dead after
/// `silence_ns`.
pub fn run(
    make: impl FnOnce(u64) -> (Node, Vec<Action>),
    silence_ns: u64,
    events: &Receiver<Event>,
    agent: &Agent,
) {
    let mut clock = Clock { began: Instant::now(), stood_still: 0, late_max: silence_ns / 2 };
    let (mut node, first) = make(clock.now());
    let mut answers = act(first, agent);
    let mut lease_told = 0;
    loop {
        // Acknowledgements hold it up, too.
        let until = agent.arbiter.as_ref().map_or(0, |arbiter| arbiter.lease.until());
        if until != lease_told {
            lease_told = until;
            answers.push(Event::LeaseExtended(until));
        }
        let event = match answers.pop() {
            Some(event) => event,
            None => {
                let asked_at = clock.now();
                let wait = node.next_tick().saturating_sub(asked_at).min(1_000_000_000);
                let received = events.recv_timeout(Duration::from_nanos(wait));
                let late = clock.waited(wait, clock.now() - asked_at, node.status().role);
                if let Some(late) = late {
                    answers.extend(act(node.step(clock.now(), Event::StoodStill(late)), agent));
                }
                match received {
                    Ok(event) => event,
                    Err(RecvTimeoutError::Timeout) => Event::Tick,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let event = clock.localise(event);
        let actions = node.step(clock.now(), event);
        answers.extend(act(actions, agent));
    }
}

/// Does what can be done here, passes the rest on, and returns what is answered at once.
fn act(actions: Vec<Action>, agent: &Agent) -> Vec<Event> {
    let mut answers = Vec::new();
    for action in actions {
        match action {
            Action::SendBeat(beat) => agent.heart.publish(beat),
            Action::RequestTerm { term, by } => match &agent.arbiter {
                Some(arbiter) => arbiter.wish(Wish::Take { term, by }),
                // Whoever asks gets the term (README, "Two hosts cut off").
                None => answers.push(granted_by_nobody(term)),
            },
            Action::RenewTerm { term, heirs } => {
                if let Some(arbiter) = &agent.arbiter {
                    arbiter.wish(Wish::Keep { term, heirs });
                }
            }
            Action::AwaitSpares(nodes) => {
                let shown = agent.await_spares(&nodes);
                answers.push(Event::Awaited { nodes, shown });
            }
            other => {
                if let Action::DropSpare { node, .. } = other {
                    // The owner may be waiting for this very spare to take what it sends.
                    agent.give_up(node);
                }
                agent.owner.send(Message::Act(other, Instant::now()));
            }
        }
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_a_spare_that_stood_still_stands_still() {
        let began = Instant::now() - Duration::from_secs(100);
        let mut clock = Clock { began, stood_still: 0, late_max: 45_000_000 };
        let before = clock.now();
        assert_eq!(clock.waited(30_000_000, 31_000_000, Role::Spare), None);
        assert_eq!(clock.waited(30_000_000, 31_000_000, Role::Primary), None);
        let told = clock.waited(30_000_000, 9_000_000_000, Role::Primary);
        assert_eq!(told, Some(8_970_000_000));
        assert!(clock.now() >= before);
        assert_eq!(clock.waited(30_000_000, 9_000_000_000, Role::Spare), None);
        assert!(clock.now() < before - 8_000_000_000);
    }
}
