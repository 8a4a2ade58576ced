//! The primary: runs the guest, checkpoints it, keeps spares.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hotspare_cluster::{Action, Event, FenceCause};
use hotspare_image::{Epoch, NodeId, Position, Term};
use hotspare_net::takeover::ServiceNetwork;
use hotspare_process::init::Init;
use hotspare_replica::message::SwitchoverOffer;
use hotspare_replica::{Goodbye, GoodbyeCode, MemberEntry};

use crate::agent::{Agent, Message, SpareIn};
use crate::epoch::{Attempt, EpochMaker, Obstacle, Taken};
use crate::mailbox::Inbox;
use crate::patience::Patience;
use crate::report::EpochLine;
use crate::settings::Settings;

/// How soon an attempt that met a passing obstacle is repeated.
const AGAIN: Duration = Duration::from_millis(2);
/// Longest wait for the last checkpoint of a switchover.
const HANDOVER: Duration = Duration::from_secs(2);

/// A running guest and its protection.
pub struct Primary {
    pub agent: Agent,
    pub inbox: Inbox<Message>,
    pub settings: Settings,
    pub maker: EpochMaker,
    /// PID 1 of the guest; its end is the guest's.
    pub init: Init,
    pub network: Option<ServiceNetwork>,
    pub hearts: BTreeMap<NodeId, std::net::SocketAddr>,
    pub sent: BTreeMap<Position, EpochLine>,
    /// The last checkpoint that a spare has acknowledged.
    pub committed: Epoch,
    pub told_refusal: String,
    pub patience: Patience,
    /// It has been said that checkpoints do not come.
    pub told_late: bool,
}

impl Primary {
    /// Runs until the guest has ended or this host must not run it any more. Returns the exit
    /// status.
    pub fn run(mut self) -> anyhow::Result<u8> {
        tracing::debug!(init = %self.init.host_pid(), "the guest runs");
        let mut next = Instant::now() + self.settings.epoch;
        loop {
            let wait = next.saturating_duration_since(Instant::now());
            self.maker.guest.pump(&[self.inbox.bell()], wait)?;
            for message in self.inbox.take() {
                if matches!(message, Message::SpareIn(_)) {
                    // However long an epoch is: nobody waits unprotected for its end.
                    next = Instant::now();
                }
                if let Some(status) = self.handle(message)? {
                    return Ok(status);
                }
            }
            if !self.maker.guest.is_alive() {
                return self.guest_ended();
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + self.take_epoch();
        }
    }

    /// Takes a checkpoint if somebody wants it; returns how long to wait for the next.
    fn take_epoch(&mut self) -> Duration {
        if self.maker.spares.is_empty() {
            return self.settings.epoch;
        }
        match self.maker.attempt() {
            Ok(Attempt::Later(obstacle)) => self.meet(&obstacle),
            Ok(Attempt::Taken(taken)) => {
                self.note_taken(&taken);
                self.told_refusal.clear();
                self.patience.taken();
                self.settings.epoch.saturating_sub(taken.began.elapsed()).max(AGAIN)
            }
            Err(error) => {
                let text = format!("{error:#}");
                if text != self.told_refusal {
                    self.agent
                        .reporter
                        .note(&format!("NOT PROTECTED at this time, the guest runs on: {text}"));
                    self.told_refusal = text;
                }
                self.settings.epoch
            }
        }
    }

    /// Something is in the way of a checkpoint; returns how long to wait.
    fn meet(&mut self, obstacle: &Obstacle) -> Duration {
        let (wait, told) = self.patience.met(obstacle, Instant::now());
        // Nobody expects a first checkpoint to be quick.
        let first = self.committed == Epoch(0) && *obstacle == Obstacle::SlowSpare;
        if let Some(why) = told.filter(|_| !first) {
            self.told_late = true;
            self.agent.reporter.late(&why, self.committed.0);
        }
        wait
    }

    fn note_taken(&mut self, taken: &Taken) {
        self.agent.brain.tell(Event::CheckpointTaken(taken.position));
        let offset = self.maker.offsets.monotonic_ns;
        let stop = taken.captured.checkpoint.clocks.monotonic_ns.wrapping_add_signed(-offset);
        self.sent.insert(
            taken.position,
            EpochLine {
                epoch: taken.position.epoch.0,
                parts: taken.captured.parts,
                stop_ns: stop,
                pages: taken.pages,
                bytes: 0,
                lag: 0,
            },
        );
        {
            let mut face = self.agent.face();
            face.epoch = taken.position.epoch.0;
            face.spares = self.maker.spares.len();
        }
        tracing::debug!(parts = ?taken.captured.parts, "pause");
    }

    fn handle(&mut self, message: Message) -> anyhow::Result<Option<u8>> {
        match message {
            Message::Act(action, _) => return self.act(action),
            Message::SpareIn(spare) => self.spare_in(*spare)?,
            Message::Acknowledged(node, position) => self.acknowledged(node, position),
            Message::SpareOut(node) => {
                self.maker.spares.remove(&node);
                self.hearts.remove(&node);
            }
            Message::SwitchoverRefused(node) => {
                self.agent.brain.tell(Event::SwitchoverRefused(node));
            }
            Message::Switchover => self.agent.brain.tell(Event::SwitchoverAsked(None)),
            Message::Heard(_)
            | Message::Joined(_)
            | Message::Checkpoint(..)
            | Message::PrimaryOut(..)
            | Message::GuestOver(_) => {}
        }
        Ok(None)
    }

    fn spare_in(&mut self, spare: SpareIn) -> anyhow::Result<()> {
        self.hearts.insert(spare.node, spare.heart);
        self.maker.begin_full();
        self.maker.spares.insert(spare.node, spare.sender);
        Ok(())
    }

    fn acknowledged(&mut self, node: NodeId, position: Position) {
        let reporter = &self.agent.reporter;
        self.committed = self.committed.max(position.epoch);
        if std::mem::take(&mut self.told_late) {
            reporter.protected(position.epoch.0);
        }
        let newest = self.maker.epoch.0;
        let later = self.sent.split_off(&Position::checkpoint(position.epoch.next()));
        for (at, mut line) in std::mem::replace(&mut self.sent, later) {
            line.lag = newest.saturating_sub(at.epoch.0);
            line.bytes = self.maker.wire_bytes(node);
            reporter.epoch(&line);
        }
    }

    /// Does what the brain wants; an exit status if this host is done.
    fn act(&mut self, action: Action) -> anyhow::Result<Option<u8>> {
        match action {
            Action::AcceptSpare { node, rank, term } => self.answer(node, Some((rank, term))),
            Action::RefuseSpare(node) => self.answer(node, None),
            Action::DropSpare { node, cause } => {
                let text = format!("dropped: {cause:?}");
                if let Some(spare) = self.maker.spares.remove(&node) {
                    let _ = spare.goodbye(&Goodbye { code: GoodbyeCode::Dropped, text });
                }
            }
            Action::TellMembers(members) => self.tell_members(&members),
            Action::BecomeProtected => self.agent.reporter.protected(self.committed.0),
            Action::BecomeUnprotected => self.agent.reporter.unprotected(),
            Action::Fence(cause) => return self.fence(cause),
            Action::TellGuestDied => {
                for spare in self.maker.spares.values() {
                    let _ = spare.guest_died();
                }
            }
            Action::EndProtection => self.say_goodbye("the guest has ended"),
            Action::FreezeGuest { .. } => self.freeze()?,
            Action::OfferSwitchover { to, term, position } => {
                if let Some(spare) = self.maker.spares.get(&to) {
                    let _ = spare.offer_switchover(SwitchoverOffer { term, position });
                }
            }
            Action::ThawGuest { term } => self.set_term(term),
            Action::SwitchoverImpossible => {
                self.agent.reporter.note("no spare is fit to take over; nothing was changed");
            }
            Action::SendBeat(_)
            | Action::RequestTerm { .. }
            | Action::RenewTerm(_)
            | Action::Suspect { .. }
            | Action::Trust(_)
            | Action::CannotTakeOver(_)
            | Action::StartTakeover { .. }
            | Action::Join { .. }
            | Action::RefuseSwitchover { .. } => {}
        }
        Ok(None)
    }

    fn set_term(&mut self, term: Term) {
        self.maker.term = term;
        self.agent.face().term = term;
    }

    fn answer(&mut self, node: NodeId, decision: Option<(u32, Term)>) {
        if let Some((_, term)) = decision {
            self.set_term(term);
        }
        let mut face = self.agent.face();
        for (_, waiting) in face.waiting.extract_if(.., |(waits, _)| *waits == node) {
            let _ = waiting.send(decision);
        }
    }

    fn tell_members(&self, members: &[hotspare_cluster::Member]) {
        let entries: Vec<MemberEntry> = members
            .iter()
            .map(|member| MemberEntry {
                node: member.node,
                rank: member.rank,
                ready: member.ready,
                heart: self.hearts.get(&member.node).map(ToString::to_string).unwrap_or_default(),
                listens: None,
            })
            .collect();
        for spare in self.maker.spares.values() {
            let _ = spare.members(&entries);
        }
    }

    /// The last checkpoint before a switchover: the guest does not run on after it.
    fn freeze(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + HANDOVER;
        while Instant::now() < deadline {
            self.maker.sockets.next_is_exact();
            match self.maker.attempt()? {
                Attempt::Later(_) => drop(self.maker.guest.pump(&[], AGAIN)?),
                Attempt::Taken(taken) => {
                    self.note_taken(&taken);
                    self.agent.brain.tell(Event::GuestFrozen(taken.position));
                    return Ok(());
                }
            }
        }
        bail!("no checkpoint could be taken for the switchover")
    }

    fn fence(&mut self, cause: FenceCause) -> anyhow::Result<Option<u8>> {
        if let Some(network) = self.network.as_mut() {
            network.withdraw().context("withdraw the service address")?;
        }
        self.maker.guest.kill();
        self.agent.reporter.note(&match cause {
            FenceCause::SwitchedOver => "the guest runs on the spare now".to_owned(),
            other => format!("this host does not run the guest any more: {other:?}"),
        });
        Ok(Some(if cause == FenceCause::SwitchedOver { 0 } else { 75 }))
    }

    fn say_goodbye(&self, text: &str) {
        let goodbye = Goodbye { code: GoodbyeCode::GuestEnded, text: text.to_owned() };
        for spare in self.maker.spares.values() {
            let _ = spare.goodbye(&goodbye);
        }
    }

    fn guest_ended(self) -> anyhow::Result<u8> {
        let status = self.maker.guest.root_status().unwrap_or(0);
        let code = if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status) as u8
        } else {
            128 + libc::WTERMSIG(status) as u8
        };
        // A program that the kernel killed (out of memory, kill -9) may go on elsewhere.
        if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL {
            self.agent.brain.tell(Event::GuestDied);
            for spare in self.maker.spares.values() {
                let _ = spare.guest_died();
            }
        } else {
            self.agent.brain.tell(Event::GuestEnded);
            self.say_goodbye("the guest has ended");
        }
        self.agent.reporter.exit(code);
        drop(self.maker);
        Ok(code)
    }
}
