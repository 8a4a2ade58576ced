//! What an agent is made of, whichever part it plays.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use hotspare_cluster::{Action, Closed, Event, Quorum};
use hotspare_image::{NodeId, Position, Term};
use hotspare_net::callers::Callers;
use hotspare_net::gate::Gate;
use hotspare_net::relay::Relay;
use hotspare_process::ghost::copy::GhostMemory;
use hotspare_replica::heartbeat::{HeartKey, STACK_BYTES};
use hotspare_replica::message::SwitchoverOffer;
use hotspare_replica::{
    Committed, Goodbye, GoodbyeCode, Hangup, Heart, HeartConfig, HeartEvent, Hello, HostFacts,
    HostRole, PacketSender, Replier, Security, Sender, StagedCheckpoint, WriteHalf, greeting,
    heart,
};
use hotspare_store::PackMemory;

use crate::arbiter;
use crate::brain::Brain;
use crate::control::proto::{Role, StatusResponse};
use crate::history::{History, What};
use crate::join::BackOff;
use crate::mailbox::{Mailbox, Place};
use crate::metrics::{HeartMeter, Meters};
use crate::rehearsal::{self, Plan, RehearsalId, Step};
use crate::report::Reporter;
use crate::settings::Settings;
use crate::switchover::Asker;

/// What the thread that owns the guest, or its ghost, is told.
pub enum Message {
    /// The brain wants this done, and decided so then.
    Act(Action, Instant),
    /// A spare has been welcomed; checkpoints may flow.
    SpareIn(Box<SpareIn>),
    /// A spare has acknowledged.
    Acknowledged(NodeId, Position),
    /// A stream to a spare has ended.
    SpareOut(NodeId, StreamId),
    /// A spare declines a switchover, and says why.
    SwitchoverRefused(NodeId, String),
    /// A primary has welcomed us.
    Joined(Box<Joined>),
    /// A whole checkpoint has arrived and been checked.
    Checkpoint(Arrived),
    /// The reader of a stream wants what this spare has kept in memory for it.
    Keep(StreamId, std::sync::mpsc::Sender<GhostMemory>),
    /// The primary asks whether packets may pass through here.
    OpenPath(StreamId),
    /// Packets pass through this spare.
    PathOpen(NodeId, StreamId),
    /// The primary offers its term. After the checkpoints that came before.
    Offered(NodeId, SwitchoverOffer),
    /// The stream from the primary has ended; some words about it, if they are not said elsewhere.
    PrimaryOut(StreamId, Option<String>, Closed),
    /// The primary has ended on purpose: the guest is over.
    GuestOver(String),
    /// The operator wants the guest elsewhere, perhaps on a certain host.
    Switchover(Asker, Option<IpAddr>),
    /// Output waits that no checkpoint covers.
    OutputWaits,
    /// The operator wants the guest protected, or not, for a reason.
    Protect {
        /// Which.
        wanted: bool,
        /// For the history.
        reason: String,
        /// Told when it is so.
        answer: crate::paused::Answer,
    },
    /// To be set: whoever asks wants to know that the owner lives.
    Alive(Arc<AtomicBool>),
    /// A copy of the ghost is to be tried.
    Rehearse(Plan, rehearsal::Answer),
    /// The rehearsal wants something.
    Rehearsal(RehearsalId, Step),
}

/// Which of the streams this program has had with others. A newer one of the same peer replaces
/// an older one, whose end and last words then mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(u64);

/// A checkpoint that is whole.
pub struct Arrived {
    /// The stream that brought it.
    pub stream: StreamId,
    /// What it is.
    pub staged: Box<StagedCheckpoint>,
    /// It was acknowledged as it came, since the ghost stands and all before it were.
    pub acknowledged: bool,
    /// Given back when it has been applied.
    pub place: Place,
}

/// A ghost that takes every checkpoint of its stream, so that these can be acknowledged as they
/// come.
#[derive(Clone)]
pub struct Stands {
    /// The stream.
    pub stream: StreamId,
    /// Where packets pass, if they do.
    pub relay: Option<Arc<Relay>>,
}

/// A spare that is in.
pub struct SpareIn {
    /// Which.
    pub node: NodeId,
    /// The way to it.
    pub sender: Sender,
    /// Where it hears heartbeats.
    pub heart: SocketAddr,
    /// Where it can be joined once it is primary.
    pub listens: Option<SocketAddr>,
    /// The stream.
    pub stream: StreamId,
    /// The version it speaks.
    pub version: u32,
}

/// A primary we follow.
pub struct Joined {
    /// Who it is.
    pub primary: NodeId,
    /// Its reign.
    pub term: Term,
    /// What it decides.
    pub settings: Settings,
    /// The way back.
    pub replier: Arc<Mutex<Replier<WriteHalf>>>,
    /// The stream.
    pub stream: StreamId,
    /// Ends the stream.
    pub hangup: Hangup,
}

impl Joined {
    /// Declines a switchover.
    pub fn decline(&self, why: &str) {
        let mut to = self.replier.lock().unwrap_or_else(PoisonError::into_inner);
        // A primary that is gone does not hear it.
        let _ = to.refuse_switchover(why);
    }

    /// Leaves the primary, and says why.
    pub fn leave(&self, agent: &Agent, text: &str) {
        agent.detach(self.stream);
        let goodbye = Goodbye { code: GoodbyeCode::Failed, text: text.to_owned() };
        let mut to = self.replier.lock().unwrap_or_else(PoisonError::into_inner);
        // A primary that is gone does not hear it.
        let _ = to.goodbye(&goodbye);
        self.hangup.hang_up();
    }
}

/// Most connections at a time, of hosts and of strangers that have not shown who they are yet.
/// Whoever comes then is hung up on.
const MET_MAX: usize = 512;
/// Peers that heartbeats go to.
const PEERS_MAX: usize = 64;

/// What all threads of an agent share.
#[derive(Clone)]
pub struct Agent {
    /// Who we are.
    pub node: NodeId,
    /// Our host.
    pub facts: Arc<HostFacts>,
    /// Who may be talked to.
    pub security: Security,
    /// The brain.
    pub brain: Brain,
    /// The owner of the guest.
    pub owner: Mailbox<Message>,
    /// The heart.
    pub heart: Arc<Heart>,
    /// When a primary was last heard, for the report of a failover.
    heard: Arc<Mutex<Option<Instant>>>,
    /// What is said.
    pub reporter: Reporter,
    /// What is kept of it.
    pub history: History,
    /// What is counted.
    pub meters: Arc<Meters>,
    /// Who decides about terms, if anybody does.
    pub arbiter: Option<arbiter::Handle>,
    /// What was written to the store, for restores on other hosts.
    pub memory: Option<Arc<PackMemory>>,
    face: Arc<Mutex<Face>>,
}

/// Rank and term of a spare that is welcome; none for one that is not.
pub type Decision = Option<(u32, Term)>;

/// How we present ourselves to other hosts.
pub struct Face {
    /// Our part.
    pub role: HostRole,
    /// Newest term we know.
    pub term: Term,
    /// Key of the heartbeats.
    pub key: Option<HeartKey>,
    /// Settings, once there is a guest.
    pub settings: Option<Settings>,
    /// Port that other hosts can join at.
    pub listen_port: Option<u16>,
    /// Last checkpoint taken or applied.
    pub epoch: u64,
    /// Spares of a primary.
    pub spares: usize,
    /// How many of them could take over.
    pub ready: usize,
    /// How many have the guest and only stand by.
    pub standing_by: usize,
    /// Protection is paused on purpose.
    pub paused: bool,
    /// Where heartbeats go.
    pub peers: Vec<(NodeId, SocketAddr)>,
    /// The brain's answers to spares that wait.
    pub waiting: Vec<(NodeId, std::sync::mpsc::Sender<Decision>)>,
    /// Of a primary: the newest stream of each spare.
    streams: BTreeMap<NodeId, StreamId>,
    /// Of a primary: what goes to each spare, to be given up when it counts as dead.
    pub ways: BTreeMap<NodeId, (StreamId, PacketSender)>,
    streams_made: u64,
    /// Of a spare: the stream from its primary.
    attached: Option<StreamId>,
    /// Where hosts can be joined, as far as is known.
    pub listens: BTreeMap<NodeId, SocketAddr>,
    /// Of a spare: where the primary to join is.
    pub join: Option<SocketAddr>,
    /// Of a spare: when it may have its next ghost.
    pub back_off: BackOff,
    /// Of a primary: where output is held, if it is.
    pub gate: Option<Arc<Gate>>,
    /// Of a primary: how far each spare is that has a ghost.
    pub committed: BTreeMap<NodeId, Committed>,
    /// Of a primary: the spares that output waits for.
    pub awaited: BTreeSet<NodeId>,
    /// Of a primary: the spare that packets pass through.
    pub path: Option<NodeId>,
    /// Of a spare: connections of the guest, as the primary tells them.
    pub callers: Option<Callers>,
    /// Of a spare: of how many the primary's output waits …
    pub commit_on: Quorum,
    /// … and that it is not one of them.
    pub stands_by: bool,
    /// Of a spare: the ghost, once it stands.
    pub stands: Option<Stands>,
    /// Of a spare: checkpoints that have come and were not acknowledged at once.
    pub late: usize,
    /// Of a spare: whose ghost it has.
    pub ghost_of: Option<String>,
}

impl Face {
    fn new(role: HostRole) -> Self {
        Self {
            role,
            term: Term(0),
            key: None,
            settings: None,
            listen_port: None,
            epoch: 0,
            spares: 0,
            ready: 0,
            standing_by: 0,
            paused: false,
            peers: Vec::new(),
            waiting: Vec::new(),
            streams: BTreeMap::new(),
            streams_made: 0,
            attached: None,
            listens: BTreeMap::new(),
            join: None,
            back_off: BackOff::default(),
            gate: None,
            committed: BTreeMap::new(),
            awaited: BTreeSet::new(),
            commit_on: Quorum::default(),
            stands_by: false,
            ways: BTreeMap::new(),
            path: None,
            callers: None,
            stands: None,
            late: 0,
            ghost_of: None,
        }
    }

    fn fresh_stream(&mut self) -> StreamId {
        self.streams_made += 1;
        StreamId(self.streams_made)
    }
}

impl Agent {
    /// An agent with a heart that beats. A peer counts as dead after `silence`.
    pub fn new(
        security: Security,
        role: HostRole,
        silence: Duration,
        brain: Brain,
        owner: Mailbox<Message>,
        reporter: Reporter,
        state: &std::path::Path,
    ) -> anyhow::Result<Self> {
        let socket = UdpSocket::bind("[::]:0").or_else(|_| UdpSocket::bind("0.0.0.0:0"));
        let config = HeartConfig { silence, ..HeartConfig::default() };
        let (heart, beating) = heart(socket.context("open heartbeat socket")?, config);
        let heard = Arc::new(Mutex::new(None));
        let (ears, noted, note) = (brain.clone(), heard.clone(), reporter.clone());
        let meters = Arc::new(Meters::default());
        let (counted, mut counter) = (meters.clone(), HeartMeter::default());
        let tell = move |event: HeartEvent| {
            counter.note(&event, &counted);
            match event {
                HeartEvent::Beat { beat, at } => {
                    // Nobody waits here for a thread without real-time priority.
                    if beat.leads()
                        && let Ok(mut last) = noted.try_lock()
                    {
                        *last = Some(at);
                    }
                    ears.tell(Event::Beat(beat));
                }
                HeartEvent::Silence { .. } => ears.tell(Event::Tick),
                HeartEvent::CannotSend { to, error } => {
                    note.warn(&format!("heartbeats to {to} cannot be sent: {error}"));
                }
                HeartEvent::NotRealtime(error) => {
                    note.warn(&format!("heartbeats run without real-time priority: {error}"));
                }
                HeartEvent::Leashed => note.alarm("the agent hangs; heartbeats stop"),
            }
        };
        let thread = std::thread::Builder::new().name("heart".into()).stack_size(STACK_BYTES);
        thread.spawn(move || beating.run(tell)).context("start heartbeat thread")?;
        let mut seed = [0u8; 8];
        seed.copy_from_slice(&hotspare_replica::heartbeat::fresh_key()?[..8]);
        let face = Face::new(role);
        let node = NodeId(u64::from_ne_bytes(seed));
        let history = History::begin(state, node, &reporter, meters.clone());
        let history = history.context("start history thread")?;
        Ok(Self {
            node,
            facts: Arc::new(crate::facts::read()?),
            security,
            brain,
            owner,
            heart: Arc::new(heart),
            heard,
            reporter,
            history,
            meters,
            arbiter: None,
            memory: None,
            face: Arc::new(Mutex::new(face)),
        })
    }

    /// When a primary was last heard.
    pub fn heard(&self) -> Option<Instant> {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How we present ourselves.
    pub fn face(&self) -> MutexGuard<'_, Face> {
        self.face.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Our first words to another host.
    pub fn hello(&self) -> Hello {
        let face = self.face();
        let (version_min, version_max) = greeting::versions();
        Hello {
            version_min,
            version_max,
            role: face.role,
            node: self.node,
            guest: face.settings.as_ref().map(|settings| settings.guest.clone()),
            term: face.term,
            facts: (*self.facts).clone(),
            heart_port: self.heart.address().map_or(0, |address| address.port()),
            listen_port: face.listen_port,
        }
    }

    /// This spare counts as dead: nobody waits any more for it to take what is sent.
    pub fn give_up(&self, node: NodeId) {
        let way = self.face().ways.remove(&node);
        if let Some((_, way)) = way {
            way.give_up();
        }
    }

    /// A stream to this spare begins; it replaces an older one.
    pub fn open_stream(&self, node: NodeId) -> StreamId {
        let mut face = self.face();
        let stream = face.fresh_stream();
        face.streams.insert(node, stream);
        stream
    }

    /// Tells the brain something about a spare, unless that comes from a replaced stream.
    pub fn tell_of(&self, node: NodeId, stream: StreamId, event: Event) {
        let mut face = self.face();
        if face.streams.get(&node) != Some(&stream) {
            return;
        }
        if let Event::StreamClosed { .. } = event {
            face.streams.remove(&node);
        }
        self.brain.tell(event);
    }

    /// A stream from a primary begins; it replaces an older one.
    pub fn attach(&self) -> StreamId {
        let mut face = self.face();
        let stream = face.fresh_stream();
        face.attached = Some(stream);
        stream
    }

    /// The stream from the primary ends; false if it had been replaced or left.
    pub fn detach(&self, stream: StreamId) -> bool {
        let mut face = self.face();
        let current = face.attached == Some(stream);
        if current {
            face.attached = None;
        }
        current
    }

    /// The ghost of this stream, if it stands.
    pub fn stands(&self, stream: StreamId) -> Option<Stands> {
        self.face().stands.clone().filter(|stands| stands.stream == stream)
    }

    /// Whether this is a spare that follows nobody and may have a ghost.
    pub fn wants_primary(&self) -> bool {
        let face = self.face();
        let free = face.role == HostRole::Spare && face.attached.is_none();
        free && face.back_off.wait(Instant::now()).is_none()
    }

    /// Keeps in the history what has happened to our guest.
    pub fn remember(&self, (term, epoch): (Term, u64), what: What) {
        let guest = self.face().settings.as_ref().map(|settings| settings.guest.clone());
        self.history.note(&guest.unwrap_or_else(|| "-".to_owned()), (term.0, epoch), what);
    }

    /// What `hotspare status` shows.
    pub fn status(&self) -> StatusResponse {
        let (pause_p50_us, pause_p99_us) = self.reporter.pauses_us();
        let face = self.face();
        let role = match face.role {
            HostRole::Primary => Role::Primary,
            HostRole::Spare => Role::Spare,
        };
        let stores = face.settings.as_ref().is_some_and(|settings| settings.store.is_some());
        let store = stores && face.role == HostRole::Primary;
        StatusResponse {
            store: store.then(|| self.meters.store.words()),
            pid: std::process::id(),
            guest: face.settings.as_ref().map(|all| all.guest.clone()).unwrap_or_default(),
            role: role.into(),
            term: face.term.0,
            epoch: face.epoch,
            spares: face.spares as u32,
            ready: face.ready as u32,
            standing_by: face.standing_by as u32,
            pause_p50_us,
            pause_p99_us,
            paused: face.paused,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arbiter: self.arbiter.as_ref().map(|arbiter| arbiter.identity.to_string()),
            ghost_of: face.ghost_of.clone().filter(|_| face.role == HostRole::Spare),
            lease_ms: self.arbiter.as_ref().map(|arbiter| arbiter.lease.rest().as_millis() as u64),
        }
    }

    /// Sends heartbeats to this peer, too. Whoever was added long ago and has no stream to us is
    /// dropped for it some day: each agent that is started anew is one more.
    pub fn add_peer(&self, node: NodeId, address: SocketAddr) {
        let mut face = self.face();
        face.peers.retain(|(known, _)| *known != node);
        face.peers.push((node, self.reachable(address)));
        if face.peers.len() > PEERS_MAX {
            let is_idle = |(node, _): &(NodeId, SocketAddr)| !face.streams.contains_key(node);
            let idle = face.peers.iter().position(is_idle).unwrap_or(0);
            face.peers.remove(idle);
        }
        self.heart.set_peers(face.peers.iter().map(|(_, address)| *address).collect());
    }

    /// Of a spare: this peer is still its primary, and not to be dropped for newer ones.
    pub fn keep_peer(&self, node: NodeId) {
        let mut face = self.face();
        if let Some(at) = face.peers.iter().position(|(known, _)| *known == node) {
            let kept = face.peers.remove(at);
            face.peers.push(kept);
        }
    }

    /// The heart's socket speaks IPv6, and IPv4 by mapped addresses, where there is IPv6 at all.
    fn reachable(&self, address: SocketAddr) -> SocketAddr {
        let v6 = self.heart.address().is_ok_and(|own| own.is_ipv6());
        match address.ip() {
            IpAddr::V4(v4) if v6 => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
            _ => address,
        }
    }

    /// Uses this key for heartbeats.
    pub fn set_key(&self, key: HeartKey) {
        self.face().key = Some(key);
        self.heart.set_key(key);
    }

    /// Accepts hosts for ever, each on a thread of its own.
    pub fn listen(&self, listener: TcpListener) -> anyhow::Result<()> {
        self.face().listen_port = Some(listener.local_addr()?.port());
        let agent = self.clone();
        let met = Arc::new(());
        std::thread::Builder::new().name("listener".into()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                };
                if Arc::strong_count(&met) <= MET_MAX {
                    agent.clone().meet(stream, Arc::clone(&met));
                }
            }
        })?;
        Ok(())
    }

    /// Speaks with a host on a thread of its own, which keeps `met` until the end.
    fn meet(self, stream: TcpStream, met: Arc<()>) {
        let speak = move || {
            let _met = met;
            let role = self.face().role;
            let channel = hotspare_replica::Channel::accepted(stream, &self.security);
            let met = channel.map_err(anyhow::Error::from).and_then(|channel| match role {
                HostRole::Primary => crate::link::serve(&self, channel),
                HostRole::Spare => crate::spare::follow(&self, channel),
            });
            if let Err(error) = met {
                self.reporter.note(&format!("{error:#}"));
            }
        };
        // Without a thread for it the host is hung up on, and dials again.
        drop(std::thread::Builder::new().name("stream".into()).spawn(speak));
    }
}
