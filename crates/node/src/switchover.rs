//! A planned move: the guest stands still from its last checkpoint until the spare runs it.
//!
//! ```text
//! asked ──▶ freezing ──▶ frozen, cut off ──▶ offered ──▶ the spare runs it ──▶ killed here
//!             │               │                 │
//!             └── no checkpoint, no spare, refused, takeover failed ──▶ announced, thawed
//! ```
//!
//! The network is cut after the guest has stopped and before its sockets are read: what a peer
//! sends from then on is not acknowledged here, so it is sent again to the spare, and what the
//! killed guest's sockets say reaches nobody.

use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hotspare_cluster::Event;
use hotspare_image::{NodeId, Term};
use tokio::sync::oneshot;

use crate::epoch::{Attempt, Taken};
use crate::history::What;
use crate::primary::Primary;

/// Longest wait for the last checkpoint of a switchover. The guest runs meanwhile.
const FREEZE_PATIENCE: Duration = Duration::from_secs(30);
/// How soon an attempt is repeated.
const SOON: Duration = Duration::from_millis(1);
/// How long the answer to the operator may take to be written before the program ends.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// A switchover that went well.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// From the stop of the guest until the word that it runs on the spare.
    pub stall: Duration,
    /// The checkpoint that moved it.
    pub epoch: u64,
}

/// What became of a switchover, or why the guest stays.
pub type Outcome = Result<Moved, String>;

/// Somebody who waits for the outcome of a switchover.
pub struct Asker {
    tell: oneshot::Sender<Outcome>,
    /// Closed when the answer has been passed on.
    passed_on: Receiver<()>,
}

/// The asker's own end.
pub struct Asked {
    /// Where the outcome comes.
    pub outcome: oneshot::Receiver<Outcome>,
    /// To be dropped when the outcome has been passed on.
    pub passed_on: Sender<()>,
}

impl Asker {
    /// An asker and its own end.
    pub fn new() -> (Self, Asked) {
        let ((tell, outcome), (passed_on, told)) = (oneshot::channel(), channel());
        (Self { tell, passed_on: told }, Asked { outcome, passed_on })
    }

    /// Tells the outcome, and waits until it has been passed on: the program may end next.
    pub fn answer(self, outcome: Outcome) {
        if self.tell.send(outcome).is_ok() {
            let _ = self.passed_on.recv_timeout(ANSWER_PATIENCE);
        }
    }
}

/// A switchover under way.
#[derive(Default)]
pub struct Switchover {
    asker: Option<Asker>,
    /// To whom.
    to: Option<NodeId>,
    /// Until when the last checkpoint is tried.
    freezing: Option<Instant>,
    /// When the guest stopped, and the checkpoint of that.
    frozen: Option<(Instant, u64)>,
    /// Why it may come to nothing, if that is known.
    why_not: Option<String>,
}

impl Primary {
    /// The operator wants the guest on a spare; on the one at `to`, if that is said.
    pub fn switchover_asked(&mut self, asker: Asker, to: Option<IpAddr>) {
        if self.switchover.asker.is_some() {
            asker.answer(Err("a switchover is under way already; wait for its end".into()));
            return;
        }
        if self.is_paused {
            let why = "protection is paused, so no spare has the guest: `hotspare resume` first";
            asker.answer(Err(why.into()));
            return;
        }
        let node = to.map(|to| self.spare_at(to));
        if let (Some(None), Some(to)) = (node, to) {
            let spares: Vec<_> =
                self.reach.values().map(|reach| reach.host().to_string()).collect();
            let spares = if spares.is_empty() { "none".to_owned() } else { spares.join(", ") };
            asker.answer(Err(format!("there is no spare at {to}; there are: {spares}")));
            return;
        }
        self.switchover = Switchover { asker: Some(asker), ..Switchover::default() };
        self.agent.brain.tell(Event::SwitchoverAsked(node.flatten()));
    }

    /// The next checkpoint is the last one here.
    pub fn freeze(&mut self, to: NodeId) {
        self.switchover.to = Some(to);
        self.switchover.freezing = Some(Instant::now() + FREEZE_PATIENCE);
    }

    /// Whether the last checkpoint is being tried.
    pub fn is_freezing(&self) -> bool {
        self.switchover.freezing.is_some()
    }

    /// Whether the guest stands still and waits for the spare.
    pub fn is_frozen(&self) -> bool {
        self.switchover.frozen.is_some()
    }

    /// Tries to take the last checkpoint; returns how long to wait before the next try.
    pub fn try_freeze(&mut self) -> anyhow::Result<Duration> {
        self.maker.objects.objects().sockets.next_is_exact();
        self.maker.hold(!self.maker.guest.is_held());
        let attempt = self.maker.attempt();
        self.maker.hold(false);
        let held = self.maker.guest.is_held();
        let why_not = match attempt {
            Ok(Attempt::Taken(taken)) if held => {
                self.frozen(&taken);
                return Ok(self.settings.epoch());
            }
            Ok(Attempt::Taken(taken)) => {
                // It was under way already.
                self.note_taken(&taken);
                return Ok(Duration::ZERO);
            }
            // The last one, too, has to be sent.
            Ok(Attempt::Later(_)) if held => return Ok(SOON),
            Ok(Attempt::Later(obstacle)) => {
                // The attempt may have come as far as cutting the guest off.
                self.connect_again()?;
                let late = self.switchover.freezing.is_some_and(|until| Instant::now() > until);
                let why = || format!("no last checkpoint could be taken ({obstacle:?})");
                late.then(why)
            }
            Err(error) => Some(format!("{error:#}")),
        };
        if why_not.is_some() {
            self.switchover.why_not = why_not;
            self.switchover.freezing = None;
            self.agent.brain.tell(Event::FreezeFailed);
        }
        Ok(SOON)
    }

    fn frozen(&mut self, taken: &Taken) {
        let stopped = self.note_taken(taken);
        self.switchover.freezing = None;
        self.switchover.frozen = Some((stopped, taken.position.epoch.0));
        self.agent.brain.tell(Event::GuestFrozen(taken.position));
    }

    fn connect_again(&mut self) -> anyhow::Result<()> {
        match self.maker.network.as_mut().filter(|network| !network.is_announced()) {
            Some(network) => Ok(network.announce().map(drop)?),
            None => Ok(()),
        }
    }

    /// The switchover came to nothing: the guest goes on here.
    pub fn thaw(&mut self, term: Term) -> anyhow::Result<()> {
        self.set_term(term);
        self.switchover.freezing = None;
        self.connect_again()?;
        if self.maker.guest.is_held() {
            self.maker.guest.thaw()?;
        }
        if let Some(gate) = self.gate() {
            gate.let_in();
        }
        if let Some((since, _)) = self.switchover.frozen.take() {
            let stall = since.elapsed();
            self.agent.reporter.note(&format!(
                "the switchover came to nothing; the guest runs on here after standing still for \
                 {:.0} ms",
                stall.as_secs_f64() * 1000.0
            ));
        }
        let why = self.switchover.why_not.take();
        let why = why.unwrap_or_else(|| "the spare went away or did not answer".into());
        self.answer_asker(Err(format!(
            "{why}; the guest runs on this host. See `hotspare status` and the words of the spare, \
             then try again"
        )));
        Ok(())
    }

    /// No spare is fit; nothing has been changed.
    pub fn switchover_impossible(&mut self) {
        let why = if self.maker.takers.spares.is_empty() {
            "no spare is connected: start one with `hotspare spare`, wait for `protected`"
        } else {
            "no spare has a complete ghost yet: wait for `protected`, then try again"
        };
        self.answer_asker(Err(why.to_owned()));
    }

    /// The spare says why it does not take over.
    pub fn switchover_refused(&mut self, node: NodeId, why: String) {
        self.agent.reporter.note(&format!("the spare declines the switchover: {why}"));
        if self.switchover.to == Some(node) {
            self.switchover.why_not = Some(format!("the spare declines: {why}"));
        }
        self.agent.brain.tell(Event::SwitchoverRefused(node));
    }

    /// A spare is dropped; if it was to have the guest, that is why it does not.
    pub fn heir_gone(&mut self, node: NodeId, why: &str) {
        if self.switchover.to == Some(node) {
            self.switchover.why_not.get_or_insert_with(|| why.to_owned());
        }
    }

    /// The guest runs on the spare.
    pub fn switched_over(&mut self) {
        let Some((since, epoch)) = self.switchover.frozen else { return };
        let stall = since.elapsed();
        let stall_ms = crate::history::ms(stall);
        self.agent.remember((self.maker.term, epoch), What::SwitchedAway { stall_ms });
        self.answer_asker(Ok(Moved { stall, epoch }));
    }

    /// Tells the operator, if there is one.
    pub fn answer_asker(&mut self, outcome: Outcome) {
        if let Some(asker) = self.switchover.asker.take() {
            if let Err(why) = &outcome {
                self.agent.reporter.note(&format!("no switchover: {why}"));
                self.remember(What::NotSwitched { why: why.clone() });
            }
            asker.answer(outcome);
        }
    }
}
