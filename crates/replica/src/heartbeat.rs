//! Heartbeats: small authenticated datagrams on a real-time thread of their own, so that a busy
//! host does not look like a dead one.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hotspare_cluster::{Beat, BeatRole};
use hotspare_image::{Epoch, EventIndex, NodeId, Position, Term};
use hotspare_kernel::realtime;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

/// First bytes of every datagram.
pub const MAGIC: [u8; 4] = *b"HShb";
/// Length of a datagram.
pub const BEAT_BYTES: usize = 80;
/// Stack for the thread of [`HeartLoop::run`]: all of it is locked in memory.
pub const STACK_BYTES: usize = 256 << 10;
const VERSION: u8 = 1;
const SIGNED_BYTES: usize = 48;
/// Agents that are listened to at a time; further ones take the place of those that are silent.
const SENDERS_MAX: usize = 64;
/// Agents that have gone, whose recorded datagrams are told from new ones one by one.
const GONE_MAX: usize = 4096;
/// Above ordinary real-time threads' default of 1, far below the kernel's own.
const PRIORITY: i32 = 10;

/// The key of one guest's cluster.
pub type HeartKey = [u8; 32];

/// Makes a key for [`crate::Welcome::heart_key`].
pub fn fresh_key() -> io::Result<HeartKey> {
    let mut key = [0; 32];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut key).map_err(|_| io::Error::other("the system has no random bytes"))?;
    Ok(key)
}

/// A datagram for `beat`.
#[must_use]
pub fn seal(key: &HeartKey, beat: &Beat, sequence: u64) -> [u8; BEAT_BYTES] {
    let mut bytes = [0; BEAT_BYTES];
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[5] = role_number(beat.role);
    let words = [beat.from.0, sequence, beat.term.0, beat.position.epoch.0, beat.position.event.0];
    for (into, word) in bytes[8..SIGNED_BYTES].chunks_exact_mut(8).zip(words) {
        into.copy_from_slice(&word.to_le_bytes());
    }
    let mac = blake3::keyed_hash(key, &bytes[..SIGNED_BYTES]);
    bytes[SIGNED_BYTES..].copy_from_slice(mac.as_bytes());
    bytes
}

/// What a datagram says, and its sequence number; `None` if it is not one, or was not made with
/// this key.
#[must_use]
pub fn open(key: &HeartKey, bytes: &[u8]) -> Option<(Beat, u64)> {
    let bytes: &[u8; BEAT_BYTES] = bytes.try_into().ok()?;
    let mac: [u8; 32] = bytes[SIGNED_BYTES..].try_into().ok()?;
    // Compared in constant time.
    if blake3::keyed_hash(key, &bytes[..SIGNED_BYTES]) != blake3::Hash::from_bytes(mac) {
        return None;
    }
    if bytes[0..4] != MAGIC || bytes[4] != VERSION || bytes[6..8] != [0, 0] {
        return None;
    }
    let word = |index: usize| {
        let at = 8 + index * 8;
        bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
    };
    let beat = Beat {
        from: NodeId(word(0)),
        term: Term(word(2)),
        role: role_of(bytes[5])?,
        position: Position { epoch: Epoch(word(3)), event: EventIndex(word(4)) },
    };
    Some((beat, word(1)))
}

fn role_number(role: BeatRole) -> u8 {
    match role {
        BeatRole::Primary => 1,
        BeatRole::SpareSyncing => 2,
        BeatRole::SpareReady => 3,
        BeatRole::Fenced => 4,
        BeatRole::TakeoverFailed => 5,
        BeatRole::TakingOver => 6,
        BeatRole::Suspended => 7,
    }
}

fn role_of(number: u8) -> Option<BeatRole> {
    match number {
        1 => Some(BeatRole::Primary),
        2 => Some(BeatRole::SpareSyncing),
        3 => Some(BeatRole::SpareReady),
        4 => Some(BeatRole::Fenced),
        5 => Some(BeatRole::TakeoverFailed),
        6 => Some(BeatRole::TakingOver),
        7 => Some(BeatRole::Suspended),
        _ => None,
    }
}

/// How patient the heart is.
#[derive(Clone, Copy, Debug)]
pub struct HeartConfig {
    /// Time between two beats.
    pub interval: Duration,
    /// Silence of a peer that is reported.
    pub silence: Duration,
    /// If [`Heart::publish`] is not called for so long, the heart stops: an agent that hangs must
    /// not look alive. Far above any delay of a busy host.
    pub leash: Duration,
}

impl Default for HeartConfig {
    fn default() -> Self {
        HeartConfig {
            interval: Duration::from_millis(30),
            silence: Duration::from_millis(90),
            leash: Duration::from_secs(5),
        }
    }
}

/// What the heart tells the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeartEvent {
    /// A peer is alive.
    Beat {
        /// What it says.
        beat: Beat,
        /// When it arrived.
        at: Instant,
    },
    /// A peer was not heard for [`HeartConfig::silence`]. Said once, until it is heard again.
    Silence {
        /// Whom.
        node: NodeId,
    },
    /// Sending to this peer fails (a firewall, no route); said once per peer until it works again.
    /// A peer whose datagrams are blocked on *their* way shows as one never heard.
    CannotSend {
        /// Where.
        to: SocketAddr,
        /// What the kernel says.
        error: String,
    },
    /// The thread has no real-time schedule or no locked memory, so a busy host may be taken for
    /// dead. Said once.
    NotRealtime(String),
    /// The agent has published nothing for [`HeartConfig::leash`]; beats stop until it does.
    Leashed,
}

#[derive(Clone)]
struct State {
    key: Option<HeartKey>,
    beat: Option<(Beat, Instant)>,
    peers: Vec<SocketAddr>,
}

/// The agent's handle. Its loop ends when the handle is dropped.
pub struct Heart {
    shared: Arc<Shared>,
}

struct Shared {
    socket: UdpSocket,
    state: Mutex<State>,
    sequence: AtomicU64,
    config: HeartConfig,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, key: &HeartKey, beat: &Beat, to: SocketAddr) -> io::Result<()> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        match self.socket.send_to(&seal(key, beat, sequence), to) {
            // The peer's agent has just gone, its silence will say so; or the host sends too much.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
                ) =>
            {
                Ok(())
            }
            answer => answer.map(drop),
        }
    }
}

/// The thread's half; see [`heart`].
pub struct HeartLoop {
    shared: Arc<Shared>,
    /// What is to be said, as last seen: whoever changes it may be a thread that waits for a
    /// processor, and this one does not wait for that.
    state: State,
    senders: Senders,
    unreachable: Vec<SocketAddr>,
    leashed: bool,
}

struct Heard {
    sequence: u64,
    heard_at: Instant,
    silent: bool,
}

/// Who is heard, and what of each came last. Every agent that is started anew is a new one.
#[derive(Default)]
struct Senders {
    known: HashMap<NodeId, Heard>,
    /// The last number of each that has been silent for so long that others took its place.
    gone: HashMap<NodeId, u64>,
    /// Those that are not even there any more had numbers up to this.
    floor: u64,
}

impl Senders {
    /// False for a datagram that came before, or was overtaken, and for one more agent than can be
    /// listened to.
    fn is_news(&mut self, node: NodeId, sequence: u64, heard_at: Instant) -> bool {
        if let Some(heard) = self.known.get_mut(&node) {
            let is_new = sequence > heard.sequence;
            if is_new {
                *heard = Heard { sequence, heard_at, silent: false };
            }
            return is_new;
        }
        let last = self.gone.get(&node).copied().unwrap_or(self.floor);
        if sequence <= last || (self.known.len() >= SENDERS_MAX && !self.make_room()) {
            return false;
        }
        self.gone.remove(&node);
        self.known.insert(node, Heard { sequence, heard_at, silent: false });
        true
    }

    /// Lets the one go that has been silent for longest; false if none is.
    fn make_room(&mut self) -> bool {
        let silent = self.known.iter().filter(|(_, heard)| heard.silent);
        let longest = silent.min_by_key(|(_, heard)| heard.heard_at).map(|(node, _)| *node);
        let Some((node, heard)) = longest.and_then(|node| self.known.remove_entry(&node)) else {
            return false;
        };
        self.gone.insert(node, heard.sequence);
        if self.gone.len() > GONE_MAX
            && let Some((oldest, sequence)) =
                self.gone.iter().map(|(node, last)| (*node, *last)).min_by_key(|(_, last)| *last)
        {
            self.gone.remove(&oldest);
            self.floor = self.floor.max(sequence);
        }
        true
    }
}

/// A heart that beats on `socket` once it has a key, peers and something to say. The agent gives
/// the loop a thread with [`STACK_BYTES`] of stack.
pub fn heart(socket: UdpSocket, config: HeartConfig) -> (Heart, HeartLoop) {
    // Starting at the time of day, numbers also grow over restarts.
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let sequence = AtomicU64::new(since_1970.as_nanos() as u64);
    let state = State { key: None, beat: None, peers: Vec::new() };
    let shared = Shared { socket, state: Mutex::new(state.clone()), sequence, config };
    let shared = Arc::new(shared);
    let (senders, unreachable) = (Senders::default(), Vec::new());
    let beating = HeartLoop { shared: shared.clone(), state, senders, unreachable, leashed: false };
    (Heart { shared }, beating)
}

impl Heart {
    /// Uses this key from now on.
    pub fn set_key(&self, key: HeartKey) {
        self.shared.lock().key = Some(key);
    }

    /// Sends to these from now on.
    pub fn set_peers(&self, peers: Vec<SocketAddr>) {
        self.shared.lock().peers = peers;
    }

    /// Says this from now on: call it for every `SendBeat` of the cluster. A change of part or term
    /// leaves at once, the rest with the next beat.
    pub fn publish(&self, beat: Beat) {
        let mut state = self.shared.lock();
        let before = state.beat.replace((beat, Instant::now())).map(|(beat, _)| beat);
        let news = before.is_none_or(|b| (b.role, b.term) != (beat.role, beat.term));
        if news && let Some(key) = state.key {
            let peers = state.peers.clone();
            drop(state);
            for peer in peers {
                // The loop reports what cannot be sent.
                let _ = self.shared.send(&key, &beat, peer);
            }
        }
    }

    /// Where it hears.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.shared.socket.local_addr()
    }
}

impl HeartLoop {
    /// Beats and listens until the [`Heart`] is dropped or the socket fails. `tell` must not block.
    pub fn run(mut self, mut tell: impl FnMut(HeartEvent)) -> io::Result<()> {
        let scheduled = realtime::schedule_fifo(PRIORITY).and_then(|()| realtime::lock_stack());
        if let Err(error) = scheduled {
            tracing::warn!(%error, "heartbeats run without real-time priority");
            tell(HeartEvent::NotRealtime(error.to_string()));
        }
        self.shared.socket.set_nonblocking(true)?;
        let interval = self.shared.config.interval;
        let mut due = Instant::now();
        while Arc::strong_count(&self.shared) > 1 {
            let now = Instant::now();
            self.look();
            if now >= due {
                self.beat(now, &mut tell);
                self.report_silence(now, &mut tell);
                // Beats missed while the host slept are not made up for.
                due = (due + interval).max(now);
            }
            let wait = due.saturating_duration_since(now).max(Duration::from_micros(100));
            self.wait(wait)?;
            // All that has come, before anybody is called silent.
            let mut more = SENDERS_MAX;
            while more > 0 && self.hear(&mut tell)? {
                more -= 1;
            }
        }
        Ok(())
    }

    /// Waits for a datagram. Not by a time-out of the socket (`SO_RCVTIMEO`): that is kept by the
    /// timer wheel, in a soft interrupt, which a host with much traffic leaves to an ordinary
    /// thread; 50 to 100 ms late is what was seen. ppoll(2) has a timer of its own.
    fn wait(&self, limit: Duration) -> io::Result<()> {
        let mut polls = [PollFd::new(self.shared.socket.as_fd(), PollFlags::POLLIN)];
        match ppoll(&mut polls, Some(TimeSpec::from_duration(limit)), None) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes over what is to be said, if nobody is about to change it.
    fn look(&mut self) {
        let said = match self.shared.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let State { key, beat, peers } = &mut self.state;
        (*key, *beat) = (said.key, said.beat);
        // Into the room that is there: this thread does not allocate at each of its turns.
        peers.clone_from(&said.peers);
    }

    fn beat(&mut self, now: Instant, tell: &mut impl FnMut(HeartEvent)) {
        let (Some(key), Some((beat, said_at))) = (self.state.key, self.state.beat) else { return };
        let leashed = now.saturating_duration_since(said_at) > self.shared.config.leash;
        if leashed && !self.leashed {
            tell(HeartEvent::Leashed);
        }
        self.leashed = leashed;
        if leashed {
            return;
        }
        for to in self.state.peers.iter().copied() {
            match self.shared.send(&key, &beat, to) {
                Ok(()) => self.unreachable.retain(|peer| *peer != to),
                Err(error) if !self.unreachable.contains(&to) => {
                    self.unreachable.push(to);
                    tell(HeartEvent::CannotSend { to, error: error.to_string() });
                }
                Err(_) => {}
            }
        }
    }

    fn report_silence(&mut self, now: Instant, tell: &mut impl FnMut(HeartEvent)) {
        for (node, sender) in &mut self.senders.known {
            let quiet = now.saturating_duration_since(sender.heard_at);
            if !sender.silent && quiet >= self.shared.config.silence {
                sender.silent = true;
                tell(HeartEvent::Silence { node: *node });
            }
        }
    }

    /// Hears one datagram; false if there is none.
    fn hear(&mut self, tell: &mut impl FnMut(HeartEvent)) -> io::Result<bool> {
        let mut bytes = [0; BEAT_BYTES + 1];
        let length = match self.shared.socket.recv(&mut bytes) {
            Ok(length) => length,
            Err(error) => {
                use io::ErrorKind::{ConnectionRefused, Interrupted, WouldBlock};
                return match error.kind() {
                    WouldBlock => Ok(false),
                    // A refusal is the answer to a datagram of ours to an agent that is gone.
                    Interrupted | ConnectionRefused => Ok(true),
                    _ => Err(error),
                };
            }
        };
        let Some(key) = self.state.key else { return Ok(true) };
        let Some((beat, sequence)) = open(&key, &bytes[..length]) else { return Ok(true) };
        let at = Instant::now();
        if self.senders.is_news(beat.from, sequence, at) {
            tell(HeartEvent::Beat { beat, at });
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    fn beat(node: u64) -> Beat {
        Beat {
            from: NodeId(node),
            term: Term(3),
            role: BeatRole::Primary,
            position: Position { epoch: Epoch(7), event: EventIndex(1) },
        }
    }

    #[test]
    fn a_beat_survives_its_datagram_and_no_other_key_reads_it() {
        let datagram = seal(&[1; 32], &beat(5), 9);
        assert_eq!(open(&[1; 32], &datagram), Some((beat(5), 9)));
        assert_eq!(open(&[2; 32], &datagram), None);
        assert_eq!(open(&[1; 32], &datagram[..79]), None);
        for bit in 0..BEAT_BYTES * 8 {
            let mut forged = datagram;
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&[1; 32], &forged), None, "bit {bit}");
        }
    }

    fn beating(key: HeartKey) -> (Heart, mpsc::Receiver<HeartEvent>) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (heart, beating) = heart(socket, HeartConfig::default());
        heart.set_key(key);
        let (send, events) = mpsc::channel();
        let builder = thread::Builder::new().stack_size(STACK_BYTES);
        builder.spawn(move || beating.run(|event| drop(send.send(event)))).unwrap();
        (heart, events)
    }

    fn next(events: &mpsc::Receiver<HeartEvent>) -> HeartEvent {
        loop {
            match events.recv_timeout(Duration::from_secs(60)).unwrap() {
                HeartEvent::NotRealtime(_) => {}
                event => return event,
            }
        }
    }

    #[test]
    fn a_heart_hears_another_and_then_its_silence() {
        let (left, _left_events) = beating([1; 32]);
        let (right, events) = beating([1; 32]);
        left.set_peers(vec![right.address().unwrap()]);
        left.publish(beat(1));
        let HeartEvent::Beat { beat: heard, .. } = next(&events) else { panic!() };
        assert_eq!(heard, beat(1));
        drop(left);
        loop {
            match next(&events) {
                HeartEvent::Silence { node } => break assert_eq!(node, NodeId(1)),
                HeartEvent::Beat { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_recorded_datagram_counts_once_and_a_stranger_never() {
        let (heart, events) = beating([1; 32]);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = heart.address().unwrap();
        let send = |key: u8, node: u64, sequence| {
            socket.send_to(&seal(&[key; 32], &beat(node), sequence), to).unwrap();
        };
        send(1, 1, 5);
        send(1, 1, 5);
        send(1, 1, 4);
        send(9, 2, 6);
        send(1, 3, 1);
        let mut heard = Vec::new();
        while !heard.contains(&3) {
            if let HeartEvent::Beat { beat, .. } = next(&events) {
                heard.push(beat.from.0);
            }
        }
        assert_eq!(heard, [1, 3]);
    }

    #[test]
    fn agents_that_are_started_again_and_again_are_heard() {
        let mut senders = Senders::default();
        let now = Instant::now();
        let agents = (GONE_MAX + 2 * SENDERS_MAX) as u64;
        for agent in 1..=agents {
            assert!(senders.is_news(NodeId(agent), agent * 100, now), "the {agent}th");
            senders.known.values_mut().for_each(|heard| heard.silent = true);
        }
        for agent in 1..=agents {
            assert!(!senders.is_news(NodeId(agent), agent * 100, now), "a recording of {agent}");
        }
        assert!(senders.is_news(NodeId(2000), 200_001, now), "one that was only cut off");
        assert!(senders.known.len() <= SENDERS_MAX && senders.gone.len() <= GONE_MAX);
    }

    #[test]
    fn nobody_who_is_heard_makes_room() {
        let mut senders = Senders::default();
        let now = Instant::now();
        let heard = |node| senders.is_news(NodeId(node), 9, now);
        assert_eq!((1..100).map(heard).filter(|heard| *heard).count(), SENDERS_MAX);
    }

    #[test]
    fn keys_are_fresh() {
        assert_ne!(fresh_key().unwrap(), fresh_key().unwrap());
    }
}
