//! The thread that decides: it owns the cluster's state machine, hears of everything that happens
//! and says what to do about it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use hotspare_cluster::{Action, Event, Node, granted_by_nobody};
use hotspare_replica::Heart;

use crate::agent::Message;
use crate::mailbox::Mailbox;

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
fn now(began: Instant) -> u64 {
    began.elapsed().as_nanos() as u64
}

/// Thinks until everybody who could tell it something is gone.
pub fn run(
    make: impl FnOnce(u64) -> (Node, Vec<Action>),
    events: &Receiver<Event>,
    heart: &Heart,
    agent: &Mailbox<Message>,
) {
    let began = Instant::now();
    let (mut node, first) = make(now(began));
    let mut answers = act(first, heart, agent);
    loop {
        let event = match answers.pop() {
            Some(event) => event,
            None => {
                let wait = node.next_tick().saturating_sub(now(began)).min(1_000_000_000);
                match events.recv_timeout(Duration::from_nanos(wait)) {
                    Ok(event) => event,
                    Err(RecvTimeoutError::Timeout) => Event::Tick,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let actions = node.step(now(began), event);
        answers.extend(act(actions, heart, agent));
    }
}

/// Does what can be done here, passes the rest on, and returns what is answered at once.
fn act(actions: Vec<Action>, heart: &Heart, agent: &Mailbox<Message>) -> Vec<Event> {
    let mut answers = Vec::new();
    for action in actions {
        match action {
            Action::SendBeat(beat) => heart.publish(beat),
            // There is no arbiter yet: whoever asks gets the term (README, "Two hosts cut off").
            Action::RequestTerm { term, .. } | Action::RenewTerm(term) => {
                answers.push(granted_by_nobody(term));
            }
            other => agent.send(Message::Act(other, Instant::now())),
        }
    }
    answers
}
