//! The brain of one node.

use std::collections::{BTreeMap, BTreeSet};

use hotspare_image::{NodeId, Position, Term};

mod primary;
mod spare;

use crate::event::{
    Action, Beat, BeatRole, CannotTakeOver, Claim as By, Closed, DropCause, Event, FenceCause,
    Member, Nanos, Quorum, SuspectCause,
};
use crate::mutate::{self, Mutation};

/// Most spares of one primary; ranks are below this.
pub const RANKS_MAX: u32 = 8;
/// Most peers whose last heartbeat is remembered.
const PEERS_MAX: usize = 64;

/// How many silences until a spare that the arbiter does not have among the heirs asks again.
const NOT_LISTED_SILENCES: u64 = 10;

/// How many silences a new spare may take to its first heartbeat.
const FIRST_BEAT_SILENCES: u64 = 20;

/// Who we are and how patient.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// Time between heartbeats.
    pub heartbeat_ns: Nanos,
    /// Silence after which a peer is suspected; at least three heartbeats.
    pub silence_ns: Nanos,
    /// How long an offered switchover may stay unanswered.
    pub handover_ns: Nanos,
    /// A guest whose lease is over is stopped for good: what it does reaches others by more than
    /// its packets.
    pub fence_at_expiry: bool,
    /// Of how many spares output waits for. That of the primary counts.
    pub quorum: Quorum,
    /// Somebody knows who may take over, whatever spares were told.
    pub has_arbiter: bool,
}

impl Config {
    /// Heartbeats every 30 ms, suspicion after 90 ms.
    #[must_use]
    pub fn new(node: NodeId) -> Config {
        Config {
            node,
            heartbeat_ns: 30_000_000,
            silence_ns: 90_000_000,
            handover_ns: 2_000_000_000,
            fence_at_expiry: false,
            quorum: Quorum::All,
            has_arbiter: false,
        }
    }
}

/// The part a node plays, for status and assertions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Asks the arbiter for its first term.
    Asking,
    /// A spare that knows no primary.
    Waiting,
    /// A spare of a primary.
    Spare,
    /// The primary.
    Primary,
    /// Was primary; its guest is stopped for good.
    Fenced,
    /// The guest ended by itself.
    Ended,
}

/// What a node thinks, for status lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its part.
    pub role: Role,
    /// The reign it leads, follows, or was fenced by.
    pub term: Term,
    /// Last checkpoint taken or committed.
    pub position: Position,
    /// Whether a spare could take over (primary), or this spare could (spare).
    pub ready: bool,
}

/// # Who may run the guest
///
/// ```text
///  Node::first ──▶ Asking ──granted──▶ Reigning(running) ◀──done── Reigning(taking over)
///                     │denied             │    ▲                        ▲   │failed
///                     ▼                   │    │thaw                    │   ▼
///                  Fenced ◀───────────────┤    │                        │ Fenced
///                     newer reign,        ▼    │                        │
///                     lease over,    Reigning(freezing, offered)        │granted
///                     guest killed,       │ the spare runs it           │
///                     switched over ◀─────┘                             │
///                                                                       │
///  Node::spare ──▶ Waiting ──joined──▶ Following ──▶ suspecting ──▶ claiming
///                     │ ▲                 │  ▲  ▲         │             │denied
///                     │ └─────────────────┘  │  └─trusted─┘◀────────────┘
///                     └──newer primary heard─┘
/// ```
///
/// A spare claims the next term when its primary is gone (silent, agent dead, guest dead, fenced)
/// *and* it holds a complete ghost of that very reign *and* its stream lasted until the primary
/// was gone *and* output waited for it. Where there is an arbiter, that is asked also by one that
/// only stands by, whose stream broke, or whose ghost is of a reign or stream before: the arbiter
/// knows whether the primary had gone on without it (`Node::usable`). Output waits for the
/// spares of the lowest ranks, as many as the quorum wants, each until it is gone. A spare of rank
/// *r* waits *r* silences first; one that knows of a spare more than an epoch ahead, or only
/// stands by, waits [`RANKS_MAX`] more for each. So all waiting times differ, whatever each
/// believes, and whoever comes first is heard by the others before their time is up.
///
/// A primary is deposed by any heartbeat of a newer reign. Reigns are ordered by term, then by
/// node: with an arbiter no term is given twice, without one (`none`) two cut-off spares can take
/// the same term and the order settles it once they hear each other.
pub struct Node {
    config: Config,
    state: State,
    /// Newest term known to have been given to anybody.
    seen: Term,
    heard: BTreeMap<NodeId, (Nanos, Beat)>,
    beat_due: Nanos,
}

enum State {
    Asking(Term),
    Waiting,
    Following(Following),
    Reigning(Reign),
    /// Why, and in which term.
    Fenced(FenceCause, Term),
    Ended,
}

struct Following {
    primary: NodeId,
    term: Term,
    rank: u32,
    /// The stream is open, or ended with the primary's own end.
    attached: bool,
    /// The stream ended while the primary was suspected: if it lives, its ghost is too old.
    stream_over: bool,
    /// As the primary told us, see [`Member::stands_by`].
    stands_by: bool,
    ghost: Option<Position>,
    /// The ghost of the reign or stream before, while it was fit: it counts again if this reign's
    /// primary never let its own go, or died before its guest was heard (see [`Node::usable`]).
    inherited: Option<Position>,
    /// Silence counts from the first heartbeat on; before it, datagrams may be blocked.
    heard_at: Option<Nanos>,
    suspicion: Option<Suspicion>,
    claim: Option<Claim>,
    claim_after: Nanos,
    told_unfit: bool,
}

#[derive(Clone, Copy)]
struct Suspicion {
    cause: SuspectCause,
    since: Nanos,
}

#[derive(Clone, Copy)]
struct Claim {
    term: Term,
    /// Offered by the primary.
    offered: bool,
}

struct Reign {
    term: Term,
    position: Position,
    lease_until: Nanos,
    renew_at: Nanos,
    /// Who may take the term from us, as the arbiter has it, and as it was last asked to have it.
    heirs: BTreeSet<NodeId>,
    asked: Option<BTreeSet<NodeId>>,
    /// The lease is over: nothing leaves the guest.
    suspended: bool,
    phase: Phase,
    spares: BTreeMap<NodeId, Spare>,
    protected: bool,
    /// Where the operator wants the guest, and until when that may take: output does not wait for
    /// that spare yet.
    wanted_at: Option<(NodeId, Nanos)>,
    /// Primaries of older terms that have not heard of ours, and when they were last heard.
    rivals: BTreeMap<NodeId, Nanos>,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    TakingOver,
    Running,
    Freezing {
        to: NodeId,
        frozen_at: Option<Position>,
    },
    /// `claimed`: the spare has said that it takes over; until it runs, the guest is kept.
    /// `left`: it has died or gone, and runs no guest.
    Offered {
        to: NodeId,
        term: Term,
        give_up_at: Nanos,
        claimed: bool,
        left: bool,
        reclaim: Option<Term>,
    },
}

struct Spare {
    rank: u32,
    acknowledged: Option<Position>,
    /// Output is to wait for it.
    picked: bool,
    /// Output waits for it; what may have been shown before.
    counts_from: Option<Position>,
    /// It was told so, and has not heard otherwise.
    stands_by: bool,
    joined_at: Nanos,
    /// Its last heartbeat; acknowledgements count too once there was one.
    heard_at: Option<Nanos>,
    /// It says it is ready, so it hears our heartbeats, too.
    hears: bool,
}

impl Node {
    /// The node that starts the guest. Its first action is to ask for term 1.
    #[must_use]
    pub fn first(config: Config, now: Nanos) -> (Node, Vec<Action>) {
        let term = Term(1);
        let node = Node::with_state(config, State::Asking(term), now);
        (node, vec![Action::RequestTerm { term, by: By::First }])
    }

    /// The node that starts the guest, in a term that it holds already.
    #[must_use]
    pub fn reigning(config: Config, now: Nanos, term: Term, until: Nanos) -> Node {
        let reign = Reign::new(now, term, until, Phase::Running);
        let mut node = Node::with_state(config, State::Reigning(reign), now);
        node.seen = term;
        node
    }

    /// A spare that knows no primary yet.
    #[must_use]
    pub fn spare(config: Config, now: Nanos) -> Node {
        Node::with_state(config, State::Waiting, now)
    }

    fn with_state(config: Config, state: State, now: Nanos) -> Node {
        Node { config, state, seen: Term(0), heard: BTreeMap::new(), beat_due: now }
    }

    /// What it thinks now.
    #[must_use]
    pub fn status(&self) -> Status {
        let none = Position::default();
        let (role, term, position, ready) = match &self.state {
            State::Asking(term) => (Role::Asking, *term, none, false),
            State::Waiting => (Role::Waiting, self.seen, none, false),
            State::Following(f) => {
                (Role::Spare, f.term, f.ghost.unwrap_or_default(), self.unfit(f).is_none())
            }
            State::Reigning(r) => (Role::Primary, r.term, r.position, r.protected),
            State::Fenced(..) => (Role::Fenced, self.seen, none, false),
            State::Ended => (Role::Ended, self.seen, none, false),
        };
        Status { role, term, position, ready }
    }

    /// When the next [`Event::Tick`] is due at the latest.
    #[must_use]
    pub fn next_tick(&self) -> Nanos {
        let decide_at = match &self.state {
            State::Following(f) => match f.suspicion {
                None => {
                    f.heard_at.map_or(Nanos::MAX, |at| at.saturating_add(self.config.silence_ns))
                }
                Some(_) if f.claim.is_some() || self.unfit(f).is_some() => Nanos::MAX,
                Some(suspicion) => self.claim_at(f, suspicion),
            },
            State::Reigning(Reign {
                phase: Phase::Offered { give_up_at, reclaim, .. }, ..
            }) => reclaim.map_or(*give_up_at, |_| Nanos::MAX),
            State::Reigning(r) if r.suspended => r.renew_at.min(r.wanted_until()),
            State::Reigning(r) => r.lease_until.min(r.renew_at).min(r.wanted_until()),
            State::Asking(_) | State::Waiting | State::Fenced(..) | State::Ended => Nanos::MAX,
        };
        self.beat_due.min(decide_at)
    }

    /// One event at time `now` (never less than before); what to do about it, in order.
    pub fn step(&mut self, now: Nanos, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Tick => self.tick(now, &mut out),
            Event::Beat(beat) => self.hear(now, beat, &mut out),
            Event::StoodStill(for_ns) => self.stood_still(now, for_ns),
            Event::StreamClosed { peer, how } => self.stream_closed(now, peer, how, &mut out),
            Event::SpareJoined(node) => self.spare_joined(now, node, &mut out),
            Event::SpareAcknowledged { node, position } => {
                self.spare_acknowledged(now, node, position, &mut out);
            }
            Event::CheckpointTaken(position) => {
                if let State::Reigning(reign) = &mut self.state {
                    reign.position = reign.position.max(position);
                }
            }
            Event::GuestDied => self.guest_died(&mut out),
            Event::GuestEnded => self.guest_ended(&mut out),
            Event::SwitchoverAsked(to) => self.switchover_asked(now, to, &mut out),
            Event::GuestFrozen(position) => self.guest_frozen(now, position, &mut out),
            Event::FreezeFailed => self.freeze_failed(&mut out),
            Event::SwitchoverRefused(node) => self.switchover_refused(node, &mut out),
            Event::Joined { primary, term, rank, quorum } => {
                self.joined(now, (primary, term), rank, quorum);
            }
            Event::Awaited { nodes, shown } => self.awaited(&nodes, shown, &mut out),
            Event::Members(members) => self.members(&members),
            Event::Committed { term, position } => self.committed(term, position),
            Event::GhostLost => {
                if let State::Following(f) = &mut self.state {
                    (f.ghost, f.inherited) = (None, None);
                }
            }
            Event::PrimaryLostGuest(node) => {
                self.primary_gone(now, node, SuspectCause::GuestDied, &mut out);
            }
            Event::SwitchoverOffered { from, term, position } => {
                self.switchover_offered(from, term, position, &mut out);
            }
            Event::TakeoverForced => self.takeover_forced(&mut out),
            Event::TakeoverDone => self.takeover_done(&mut out),
            Event::TakeoverFailed => self.takeover_failed(&mut out),
            Event::TermGranted { term, until, heirs } => {
                self.term_granted(now, term, until, &mut out);
                self.heirs_recorded(term, heirs, &mut out);
            }
            Event::TermDenied { term, held, retry_at } => {
                self.term_denied(now, term, held, retry_at, &mut out);
            }
            Event::LeaseExtended(until) => self.lease_extended(now, until, &mut out),
        }
        out
    }

    fn tick(&mut self, now: Nanos, out: &mut Vec<Action>) {
        match &self.state {
            State::Following(_) => self.watch_primary(now, out),
            State::Reigning(_) => {
                self.watch_lease(now, out);
                self.watch_spares(now, out);
                self.watch_offer(now, out);
                self.watch_wanted(now, out);
                self.watch_rivals(now, out);
            }
            State::Asking(_) | State::Waiting | State::Fenced(..) | State::Ended => {}
        }
        if now >= self.beat_due {
            self.beat_due = now.saturating_add(self.config.heartbeat_ns);
            self.send_beat(out);
        }
    }

    fn send_beat(&self, out: &mut Vec<Action>) {
        let (term, role, position) = match &self.state {
            // One that does not hear its primary would not notice its silence.
            State::Following(f) if f.ghost.is_some() && f.heard_at.is_some() => {
                (f.term, BeatRole::SpareReady, f.ghost.unwrap_or_default())
            }
            State::Following(f) => (f.term, BeatRole::SpareSyncing, Position::default()),
            State::Reigning(r) if r.phase == Phase::TakingOver => {
                (r.term, BeatRole::TakingOver, r.position)
            }
            State::Reigning(r) if r.suspended => (r.term, BeatRole::Suspended, r.position),
            State::Reigning(r) => (r.term, BeatRole::Primary, r.position),
            State::Fenced(FenceCause::TakeoverFailed, term) if *term == self.seen => {
                (*term, BeatRole::TakeoverFailed, Position::default())
            }
            State::Fenced(..) => (self.seen, BeatRole::Fenced, Position::default()),
            State::Asking(_) | State::Waiting | State::Ended => return,
        };
        out.push(Action::SendBeat(Beat { from: self.config.node, term, role, position }));
    }

    fn hear(&mut self, now: Nanos, beat: Beat, out: &mut Vec<Action>) {
        if beat.from == self.config.node {
            return;
        }
        let foreign_reign = self.is_newer_reign(&beat);
        self.seen = self.seen.max(beat.term);
        self.heard.insert(beat.from, (now, beat));
        if self.heard.len() > PEERS_MAX
            && let Some(longest) = self.heard.iter().min_by_key(|(_, (at, _))| *at)
        {
            let longest = *longest.0;
            self.heard.remove(&longest);
        }
        match &mut self.state {
            State::Reigning(reign) => {
                let ready = beat.role == BeatRole::SpareReady && beat.term == reign.term;
                let spare = reign.spares.get_mut(&beat.from);
                let changed = spare.is_some_and(|spare| spare.hear(now, ready));
                reign.hear_rival(now, beat, out);
                if self.hear_heir(now, beat, out) {
                    return;
                }
                if foreign_reign {
                    self.fence(FenceCause::NewerReign(beat.term), out);
                } else if changed {
                    self.spares_changed(out);
                }
            }
            State::Following(_) | State::Waiting if foreign_reign => self.follow(now, beat, out),
            State::Following(f) if f.primary == beat.from && f.term == beat.term => {
                self.hear_primary(now, beat, out);
            }
            State::Following(_)
            | State::Waiting
            | State::Asking(_)
            | State::Fenced(..)
            | State::Ended => {}
        }
    }

    /// Whether the beat proves a reign that ends ours, or a primary to follow instead of ours.
    fn is_newer_reign(&self, beat: &Beat) -> bool {
        let leads = beat.leads();
        let led = leads || beat.role == BeatRole::TakeoverFailed;
        match &self.state {
            State::Reigning(_) if mutate::is(Mutation::NoDeposition) => false,
            State::Reigning(r) => {
                beat.term > r.term || (leads && (beat.term, beat.from) > (r.term, self.config.node))
            }
            State::Following(f) => led && (beat.term, beat.from) > (f.term, f.primary),
            State::Waiting => led && beat.term >= self.seen,
            State::Asking(_) | State::Fenced(..) | State::Ended => false,
        }
    }

    fn fence(&mut self, cause: FenceCause, out: &mut Vec<Action>) {
        self.state = State::Fenced(cause, self.status().term);
        out.push(Action::Fence(cause));
        self.send_beat(out);
    }

    fn follow(&mut self, now: Nanos, beat: Beat, out: &mut Vec<Action>) {
        let (inherited, rank) = match &self.state {
            State::Following(f) if f.attached && f.ghost.is_some() => (f.ghost, f.rank),
            // Of a broken stream; or two in a row have died while they took over.
            State::Following(f) => (self.usable(f).filter(|_| self.config.has_arbiter), f.rank),
            _ => (None, RANKS_MAX),
        };
        let following = Following::new(Some(now), beat.from, beat.term);
        self.state = State::Following(Following { inherited, rank, ..following });
        if beat.leads() {
            out.push(Action::Join { primary: beat.from, term: beat.term });
        } else {
            self.hear_primary(now, beat, out);
        }
    }
}

/// The arbiter's answers.
impl Node {
    fn term_granted(&mut self, now: Nanos, term: Term, until: Nanos, out: &mut Vec<Action>) {
        match &mut self.state {
            State::Asking(asked) if *asked == term => {
                self.state = State::Reigning(Reign::new(now, term, until, Phase::Running));
                self.seen = self.seen.max(term);
                self.send_beat(out);
            }
            State::Following(f) if f.claim.is_some_and(|claim| claim.term == term) => {
                let position = f.ghost.or(f.inherited).unwrap_or_default();
                let reign = Reign::new(now, term, until, Phase::TakingOver);
                self.state = State::Reigning(Reign { position, ..reign });
                self.seen = self.seen.max(term);
                // First of all the others must know, or they would claim as well.
                self.send_beat(out);
                out.push(Action::StartTakeover { term });
                out.push(Action::BecomeUnprotected);
            }
            State::Reigning(reign) if reign.term == term => {
                reign.lease(now, until);
                if std::mem::take(&mut reign.suspended) {
                    out.push(Action::Resume);
                    self.send_beat(out);
                }
            }
            State::Reigning(reign) => {
                if let Phase::Offered { reclaim, .. } = reign.phase
                    && reclaim == Some(term)
                {
                    reign.term = term;
                    reign.lease(now, until);
                    (reign.heirs, reign.asked, reign.suspended) = (BTreeSet::new(), None, false);
                    self.seen = self.seen.max(term);
                    self.drop_all_spares(out);
                    self.thaw(out);
                }
            }
            State::Asking(_)
            | State::Waiting
            | State::Following(_)
            | State::Fenced(..)
            | State::Ended => {}
        }
    }

    fn term_denied(
        &mut self,
        now: Nanos,
        term: Term,
        held: Term,
        retry_at: Option<Nanos>,
        out: &mut Vec<Action>,
    ) {
        self.seen = self.seen.max(held);
        match &mut self.state {
            State::Asking(asked) if *asked == term => {
                self.fence(FenceCause::NewerReign(held), out);
            }
            State::Following(f) => {
                let Some(claim) = f.claim.filter(|claim| claim.term == term) else { return };
                f.claim = None;
                let patience_ns = self.config.silence_ns.saturating_mul(match retry_at {
                    Some(_) => 1,
                    None => NOT_LISTED_SILENCES,
                });
                // Another look costs a request; sooner than in a heartbeat nothing changes.
                let soon = now.saturating_add(self.config.heartbeat_ns);
                f.claim_after =
                    retry_at.filter(|at| *at > now).map_or(now + patience_ns, |at| at.max(soon));
                if retry_at.is_none() && !std::mem::replace(&mut f.told_unfit, true) {
                    out.push(Action::CannotTakeOver(CannotTakeOver::NoHeir));
                }
                if claim.offered {
                    out.push(Action::RefuseSwitchover { from: f.primary });
                }
            }
            State::Reigning(reign) => {
                let reclaims = matches!(reign.phase,
                    Phase::Offered { reclaim, .. } if reclaim == Some(term));
                // It went before its first heartbeat said that the term was its own.
                if reclaims
                    && let Phase::Offered { term: given, claimed, left: true, reclaim, .. } =
                        &mut reign.phase
                    && *given == held
                    && !std::mem::replace(claimed, true)
                {
                    *reclaim = None;
                    return self.reclaim(Some(held), out);
                }
                let offered = matches!(reign.phase, Phase::Offered { .. });
                if reclaims || (reign.term == term && held > term && !offered) {
                    self.fence(FenceCause::NewerReign(held), out);
                }
            }
            State::Asking(_) | State::Waiting | State::Fenced(..) | State::Ended => {}
        }
    }
}
