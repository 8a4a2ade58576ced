//! What a node is told and what it asks for.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use hotspare_image::{NodeId, Position, Term};

/// Nanoseconds of any clock that never goes back (`CLOCK_MONOTONIC`); its start does not matter.
pub type Nanos = u64;

/// What a heartbeat says of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// The sender.
    pub from: NodeId,
    /// The reign it leads or follows.
    pub term: Term,
    /// What it does there.
    pub role: BeatRole,
    /// The last checkpoint taken (primary) or committed (spare).
    pub position: Position,
}

/// The sender's part, as a heartbeat carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeatRole {
    /// Runs the guest.
    Primary,
    /// Has been given the term and lets its ghost go, which does not run yet.
    TakingOver,
    /// Has no complete ghost of this reign.
    SpareSyncing,
    /// Has a complete ghost of this reign.
    SpareReady,
    /// Was primary of this term and has stopped its guest.
    Fenced,
    /// Was given this term, but its ghost never ran: older ghosts are as good as before.
    TakeoverFailed,
    /// Runs the guest, from which nothing leaves: it cannot renew its term.
    Suspended,
}

impl Beat {
    /// Whether the sender leads the reign it names.
    #[must_use]
    pub fn leads(&self) -> bool {
        matches!(self.role, BeatRole::Primary | BeatRole::TakingOver)
    }
}

/// A spare as the primary describes it to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The spare.
    pub node: NodeId,
    /// Its place in the queue; fixed while it stays joined.
    pub rank: u32,
    /// Whether it has acknowledged a complete checkpoint.
    pub ready: bool,
    /// Clients may have seen more than it knows: nobody waits for it.
    pub stands_by: bool,
}

/// Of how many spares output waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quorum {
    /// Of so many at least, if there are as many.
    Count(u32),
    /// Of more than a half.
    Majority,
    /// Of all.
    #[default]
    All,
}

impl Quorum {
    /// How many of so many that is.
    #[must_use]
    pub fn of(self, spares: usize) -> usize {
        match self {
            Quorum::Count(count) => spares.min(count as usize),
            Quorum::Majority => (spares / 2 + 1).min(spares),
            Quorum::All => spares,
        }
    }
}

/// How a stream came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The peer's kernel closed it (end of file, reset) without a goodbye: its agent is dead, and
    /// with it the guest, which the kernel kills together with its tracer.
    ByPeer,
    /// The peer said goodbye and lives on.
    Goodbye,
    /// We closed it ourselves: unreadable bytes, a full disk, an operator.
    ByUs,
    /// Our kernel gave it up: the peer did not answer for as long as the stream waits.
    Silent,
}

impl fmt::Display for Quorum {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Quorum::Count(count) => count.fmt(to),
            Quorum::Majority => to.write_str("majority"),
            Quorum::All => to.write_str("all"),
        }
    }
}

impl FromStr for Quorum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("all", _) => Ok(Quorum::All),
            ("majority", _) => Ok(Quorum::Majority),
            (_, Ok(count)) if count > 0 => Ok(Quorum::Count(count)),
            _ => Err(format!("{text:?} is no number of spares: 1, majority or all")),
        }
    }
}

/// Something that happened. Times are given beside it, to [`crate::Node::step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed. Wanted at least at [`crate::Node::next_tick`].
    Tick,
    /// A heartbeat arrived.
    Beat(Beat),
    /// This agent stood still for so many nanoseconds until now (a host without processors, a
    /// paused virtual machine): for a primary that was no silence of its spares, who may have
    /// stood still with it, or whose heartbeats nobody has heard yet. Leases go on.
    StoodStill(Nanos),
    /// A stream ended.
    StreamClosed {
        /// At whose other end.
        peer: NodeId,
        /// In which way.
        how: Closed,
    },

    // On a primary.
    /// A spare asks to join; its identity and host were found good.
    SpareJoined(NodeId),
    /// A spare has committed a complete ghost at `position`.
    SpareAcknowledged {
        /// Which.
        node: NodeId,
        /// How far.
        position: Position,
    },
    /// From now on nothing leaves the guest that these spares do not have.
    Awaited {
        /// Which.
        nodes: BTreeSet<NodeId>,
        /// How much may have left without them.
        shown: Position,
    },
    /// A checkpoint was taken; heartbeats mention it.
    CheckpointTaken(Position),
    /// The guest was killed (signal, out of memory), seen through its pidfd.
    GuestDied,
    /// The guest ended by itself: there is nothing left to protect.
    GuestEnded,
    /// The operator wants the guest elsewhere; `None` leaves the choice of spare to the node.
    SwitchoverAsked(Option<NodeId>),
    /// For a switchover: the guest stands still and its last checkpoint is at this position.
    GuestFrozen(Position),
    /// The guest could not be frozen; it runs on.
    FreezeFailed,
    /// The spare declined the offer, or could not let its ghost go; it will not take over.
    SwitchoverRefused(NodeId),

    // On a spare.
    /// A primary has welcomed us; a full checkpoint follows.
    Joined {
        /// The primary.
        primary: NodeId,
        /// Its term.
        term: Term,
        /// Our rank.
        rank: u32,
        /// What the guest's output waits for.
        quorum: Quorum,
    },
    /// The primary lists its spares.
    Members(Vec<Member>),
    /// The ghost is complete and applied at `position` of reign `term`.
    Committed {
        /// Reign of the primary that sent it.
        term: Term,
        /// How far.
        position: Position,
    },
    /// The ghost cannot be used any more.
    GhostLost,
    /// The primary says that its guest was killed.
    PrimaryLostGuest(NodeId),
    /// The primary has frozen its guest at `position` and offers us term `term`.
    SwitchoverOffered {
        /// The primary.
        from: NodeId,
        /// The term to take.
        term: Term,
        /// The last checkpoint.
        position: Position,
    },
    /// The operator wants this spare to take over from whatever ghost it has, however old.
    TakeoverForced,
    /// The ghost runs.
    TakeoverDone,
    /// The ghost could not be let go.
    TakeoverFailed,

    // From the arbiter.
    /// The term is ours until `until` (`Nanos::MAX`: for ever).
    TermGranted {
        /// Which.
        term: Term,
        /// When it ends unless renewed.
        until: Nanos,
        /// Who may take it from us, as the arbiter has it.
        heirs: BTreeSet<NodeId>,
    },
    /// All heirs have acknowledged: what leaves until then nobody else contradicts.
    LeaseExtended(Nanos),
    /// Somebody else holds `held`.
    TermDenied {
        /// The term asked for.
        term: Term,
        /// The newest term the arbiter knows.
        held: Term,
        /// When to ask again; `None`: the arbiter does not have us among the heirs.
        retry_at: Option<Nanos>,
    },
}

/// By what right a node wants a term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It starts the guest, or the operator wants it so.
    First,
    /// The holder is silent, and named it an heir.
    Heir,
    /// The holder of this reign has said that its guest is stopped for good.
    Word(Term),
    /// The holder of this reign offers it, and may want it back until the guest runs here.
    Offer(Term),
}

/// Something the agent must do now, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send to every known peer.
    SendBeat(Beat),
    /// Tell the arbiter that we want `term`; answer with [`Event::TermGranted`] or
    /// [`Event::TermDenied`].
    RequestTerm {
        /// Which.
        term: Term,
        /// By what right.
        by: Claim,
    },
    /// Ask the arbiter for more time; answer with [`Event::TermGranted`] or [`Event::TermDenied`].
    RenewTerm {
        /// Which.
        term: Term,
        /// Who may take it from us from now on.
        heirs: BTreeSet<NodeId>,
    },
    /// The lease is over: nothing may leave the guest, until [`Action::Resume`].
    Suspend,
    /// The term was renewed after all.
    Resume,
    /// For the log and the status: the primary may be dead.
    Suspect {
        /// Whom.
        primary: NodeId,
        /// Why.
        cause: SuspectCause,
    },
    /// For the log: it was not.
    Trust(NodeId),
    /// The primary is gone and this spare must not replace it. Somebody must look.
    CannotTakeOver(CannotTakeOver),
    /// Let the ghost go; answer with [`Event::TakeoverDone`] or [`Event::TakeoverFailed`].
    StartTakeover {
        /// The new reign.
        term: Term,
    },
    /// Dial this primary and ask to join.
    Join {
        /// Whom.
        primary: NodeId,
        /// Its term.
        term: Term,
    },
    /// Welcome the spare and send it a full checkpoint.
    AcceptSpare {
        /// Whom.
        node: NodeId,
        /// Its rank.
        rank: u32,
        /// Our term.
        term: Term,
    },
    /// Refuse the spare for now: we are not primary, between two phases, or there are too many.
    RefuseSpare(NodeId),
    /// Close the spare's stream with a goodbye.
    DropSpare {
        /// Whom.
        node: NodeId,
        /// Why.
        cause: DropCause,
    },
    /// Send to every spare.
    TellMembers(Vec<Member>),
    /// Let output wait for all of these and nobody else; answer with [`Event::Awaited`].
    AwaitSpares(BTreeSet<NodeId>),
    /// At least one spare could take over from now on.
    BecomeProtected,
    /// No spare could take over any more; the guest goes on alone.
    BecomeUnprotected,
    /// Stop and kill the guest, withdraw its address, for good.
    Fence(FenceCause),
    /// Tell the spares that the guest was killed, so that one takes over at once.
    TellGuestDied,
    /// Tell the spares that the guest ended by itself, and end.
    EndProtection,
    /// Freeze the guest, send its last checkpoint to all, answer with [`Event::GuestFrozen`].
    FreezeGuest {
        /// The spare meant to take over.
        to: NodeId,
    },
    /// Offer the term; the guest stays frozen.
    OfferSwitchover {
        /// To whom.
        to: NodeId,
        /// Which.
        term: Term,
        /// The last checkpoint.
        position: Position,
    },
    /// Decline an offer.
    RefuseSwitchover {
        /// Who offered.
        from: NodeId,
    },
    /// Tell the operator that there is no spare fit to take over.
    SwitchoverImpossible,
    /// The switchover came to nothing: let the guest run on, in this term.
    ThawGuest {
        /// The old term, or one newer than the one offered if the spare may have taken that.
        term: Term,
    },
    /// Another host had our address and has given it up: tell the neighbours once more.
    AnnounceAgain,
}

/// Why a primary drops a spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropCause {
    /// No heartbeat for the configured time.
    Silent,
    /// No heartbeat ever: the datagrams are blocked somewhere.
    NeverHeard,
    /// We go on in a new term, which the spare has to join.
    NewTerm,
}

/// Why a spare suspects its primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuspectCause {
    /// No heartbeat for the configured time.
    Silence,
    /// Its agent died: the stream ended without a goodbye.
    AgentDied,
    /// It said that its guest was killed.
    GuestDied,
    /// Its heartbeat says that it has fenced itself.
    Fenced,
    /// It cannot renew its term: nothing leaves its guest.
    Suspended,
}

/// Why a spare does not replace a primary that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CannotTakeOver {
    /// It never had a complete ghost of that reign, nor one of before that an arbiter might take.
    GhostIncomplete,
    /// Its stream had ended before, so the ghost is older than one epoch. Only without an arbiter.
    Detached,
    /// Another node has reigned since. Only without an arbiter.
    AnotherReigned,
    /// Output did not wait for it: clients may have seen what it does not know.
    StandsBy,
    /// The arbiter does not have it among the heirs: the primary had gone on without it.
    NoHeir,
}

/// Why a primary must stop its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceCause {
    /// A newer reign exists.
    NewerReign(Term),
    /// The arbiter did not renew the term in time.
    LeaseExpired,
    /// The guest is dead already; its remains are cleared away.
    GuestDied,
    /// The spare has taken over as planned.
    SwitchedOver,
    /// The ghost could not be let go.
    TakeoverFailed,
}

/// The answer of `--arbiter none`: always yes, for ever. Two hosts that cannot hear each other will
/// then both reign.
#[must_use]
pub fn granted_by_nobody(term: Term) -> Event {
    Event::TermGranted { term, until: Nanos::MAX, heirs: BTreeSet::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quorum_is_of_those_there_are() {
        let of =
            |text: &str| [0, 1, 2, 3, 4].map(|spares| text.parse::<Quorum>().unwrap().of(spares));
        assert_eq!(of("1"), [0, 1, 1, 1, 1]);
        assert_eq!(of("3"), [0, 1, 2, 3, 3]);
        assert_eq!(of("majority"), [0, 1, 2, 2, 3]);
        assert_eq!(of("all"), [0, 1, 2, 3, 4]);
        for wrong in ["0", "none", "-1", ""] {
            assert!(wrong.parse::<Quorum>().is_err(), "{wrong}");
        }
        for right in ["2", "majority", "all"] {
            assert_eq!(right.parse::<Quorum>().unwrap().to_string(), right);
        }
    }
}
