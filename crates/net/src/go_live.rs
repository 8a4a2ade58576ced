//! Connections after a failover: which go on, which have to be reset.
//!
//! Under the `timeline` guarantee the ghost may be behind what a peer has seen. TCP has no answer
//! to that: an acknowledgement of bytes that were never sent is ignored, bytes that follow a hole
//! are kept until the hole is filled, and both wait for ever. So for some seconds after a failover
//! somebody has to look at what peers say, and end what cannot go on:
//!
//! ```text
//! peer acknowledges more than the ghost ever sent    it has seen output that is lost: reset
//! peer's numbers continue where the ghost's end      they agree: settled
//! peer's numbers are ahead of the ghost's            either its last bytes got lost on the way,
//!                                                    then it sends them again soon; or they were
//!                                                    received and acknowledged after the
//!                                                    checkpoint: reset after a grace period
//! ```
//!
//! A quiet peer is asked by a probe: a segment from the past, which TCP answers with its numbers
//! (RFC 9293, 3.10.7.4). The kernel sends the first one when a connection leaves repair mode.
//!
//! A connection that could not be captured, or that no checkpoint knows (see [`crate::callers`]),
//! has no socket. Its peer gets a probe, too, and the answer to that makes the kernel send the
//! reset by itself.
//!
//! A reset can get lost like any packet, and a peer that only waits would wait on. So whoever was
//! reset is asked some times more, and reset again if it still answers.
//!
//! [`Judge`] decides and has neither clock nor socket; [`GoLiveWatch`] does.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hotspare_image::objects::{Object, OpenFile};
use hotspare_image::sockets::{FIRST_FLIGHT, TcpConnection, TcpSocket, TcpState};
use hotspare_kernel::KernelError;
use hotspare_kernel::packet_tap::PacketTap;
use hotspare_kernel::segment::{Segment, SegmentSender, flag, unmapped};

/// How long a peer may take to send again what seems lost, beyond the length of the outage. Linux
/// does it after 200 ms, 400 ms more, 800 ms more, so after an outage of *t* the next time comes
/// before *t* + 200 ms; more where the round trip is long. Nothing makes it hurry: Linux counts
/// duplicate acknowledgements only with SACK blocks, and does not split a single segment for one.
const GRACE: Duration = Duration::from_millis(700);
/// When a peer that has not spoken is asked again.
const PROBES: [Duration; 8] = [
    Duration::from_millis(0),
    Duration::from_millis(60),
    Duration::from_millis(250),
    Duration::from_millis(700),
    Duration::from_millis(1500),
    Duration::from_millis(3000),
    Duration::from_millis(6000),
    Duration::from_millis(12000),
];
/// How many of them a peer gets after its reset, the one at once apart.
const PROBES_AFTER_RESET: usize = 4;
/// Room for packets that wait to be looked at.
const TAP_BYTES: i32 = 32 << 20;

/// What a restored connection knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knowledge {
    /// First byte not acknowledged.
    pub send_unacknowledged: u32,
    /// First byte that the ghost's kernel does not count as sent, when it goes live.
    pub send_next: u32,
    /// One past the last byte that was ever given to TCP, with the FIN.
    pub send_end: u32,
    /// First byte not received.
    pub receive_next: u32,
    /// Window to tell the peer in a probe, as it stands in the header.
    pub window: u16,
}

/// A connection of the ghost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The guest's address.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// None for a connection that was lost.
    pub knowledge: Option<Knowledge>,
}

impl Watched {
    /// The connections of a checkpoint that lead out of the guest.
    pub fn of(files: &[OpenFile]) -> Vec<Self> {
        let sockets = files.iter().filter_map(|file| match &file.object {
            Object::Tcp(socket) => Self::of_socket(socket),
            _ => None,
        });
        let all: Vec<Self> = sockets.collect();
        let ends: Vec<_> = all.iter().map(|watched| (watched.local, watched.remote)).collect();
        let inside = |watched: &Self| ends.contains(&(watched.remote, watched.local));
        all.iter().copied().filter(|w| !w.remote.ip().is_loopback() && !inside(w)).collect()
    }

    fn of_socket(socket: &TcpSocket) -> Option<Self> {
        let plain = |address: SocketAddr| SocketAddr::new(unmapped(address.ip()), address.port());
        let local = plain(socket.local.as_ref()?.internet()?);
        let (remote, knowledge) = match &socket.state {
            TcpState::Connected(connection) => {
                (connection.remote.internet()?, Some(knowledge(connection)))
            }
            TcpState::Lost { remote, .. } => (remote.as_ref()?.internet()?, None),
            TcpState::Closed | TcpState::Listening { .. } => return None,
        };
        Some(Self { local, remote: plain(remote), knowledge })
    }
}

/// `TCP_FIN_WAIT1`, `TCP_LAST_ACK`, `TCP_CLOSING`: our FIN is on its way.
const FIN_UNDER_WAY: [u8; 3] = [4, 9, 11];

fn knowledge(connection: &TcpConnection) -> Knowledge {
    let queued = (connection.sent.len() + connection.unsent.len()) as u32;
    let fin = u32::from(FIN_UNDER_WAY.contains(&connection.kernel_state));
    let scale = connection.window_scales.map_or(0, |(_, ours)| ours);
    let window = connection.window[3].checked_shr(u32::from(scale)).unwrap_or(0);
    let as_sent = if connection.resends_at_once(FIRST_FLIGHT) { 0 } else { connection.sent.len() };
    Knowledge {
        send_unacknowledged: connection.send_unacknowledged,
        send_next: connection.send_unacknowledged.wrapping_add(as_sent as u32),
        send_end: connection.send_unacknowledged.wrapping_add(queued).wrapping_add(fin),
        receive_next: connection.receive_next,
        window: window.clamp(1, u32::from(u16::MAX)) as u16,
    }
}

/// `a` comes after `b` in sequence space (RFC 9293, 3.4).
fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// What we hold of a connection under watch.
#[derive(Clone, Copy, Debug)]
struct Case {
    knowledge: Option<Knowledge>,
    /// Highest number we have seen the ghost send.
    sent: u32,
    /// When the peer was first seen ahead of us, and the last segment that showed it.
    ahead: Option<(Duration, Segment)>,
    probes: usize,
    /// When it was reset. From then on probes count from here.
    reset: Option<Duration>,
}

/// Outcome for all connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdicts {
    /// The peer agrees with the ghost.
    pub settled: usize,
    /// The peer had moved past the checkpoint, or the connection was lost.
    pub reset: usize,
    /// The peer has not spoken.
    pub silent: usize,
}

/// Decides which connections go on. Time is what the caller says, since go-live.
#[derive(Debug, Default)]
pub struct Judge {
    grace: Duration,
    cases: HashMap<(SocketAddr, SocketAddr), Case>,
    verdicts: Verdicts,
}

impl Judge {
    /// For these connections, which nobody answered for the time of `outage`.
    pub fn new(connections: &[Watched], outage: Duration) -> Self {
        let cases = connections.iter().map(|watched| {
            let knowledge = watched.knowledge;
            let sent = knowledge.map_or(0, |known| known.send_next);
            let case = Case { knowledge, sent, ahead: None, probes: 0, reset: None };
            ((watched.local, watched.remote), case)
        });
        let (cases, verdicts) = (cases.collect(), Verdicts::default());
        Self { grace: GRACE + outage, cases, verdicts }
    }

    /// Whether every connection has its verdict, and those that were reset seem to know.
    pub fn is_done(&self) -> bool {
        self.cases.is_empty()
    }

    /// The verdicts so far.
    pub fn verdicts(&self) -> Verdicts {
        let silent = self.cases.values().filter(|case| case.reset.is_none()).count();
        Verdicts { silent: self.verdicts.silent + silent, ..self.verdicts }
    }

    /// Packets were missed: a verdict over a connection that may go on could be wrong, and then
    /// one that hangs is better than one that is reset without need. What is lost anyway is not
    /// concerned.
    pub fn missed_packets(&mut self) {
        let before = self.cases.len();
        self.cases.retain(|_, case| case.knowledge.is_none() || case.reset.is_some());
        self.verdicts.silent += before - self.cases.len();
    }

    /// A segment of the ghost leaves.
    pub fn outgoing(&mut self, now: Duration, segment: &Segment) {
        let key = (segment.from, segment.to);
        let Some(case) = self.cases.get_mut(&key) else { return };
        if segment.flags & flag::SYN != 0 {
            // The ghost calls the peer anew.
            self.close(key);
            return;
        }
        let Some(knowledge) = &mut case.knowledge else {
            // The kernel resets what it has no socket for.
            if segment.flags & flag::RST != 0 && case.reset.is_none() {
                (case.reset, case.probes) = (Some(now), 1);
                self.verdicts.reset += 1;
            }
            return;
        };
        let end = segment.sequence.wrapping_add(segment.span());
        if after(end, case.sent) {
            case.sent = end;
        }
        if after(end, knowledge.send_end) {
            knowledge.send_end = end;
        }
        let acknowledges = segment.flags & flag::ACK != 0;
        if acknowledges && after(segment.acknowledgement, knowledge.receive_next) {
            knowledge.receive_next = segment.acknowledgement;
        }
    }

    /// A segment of a peer arrives. What has to be sent now.
    pub fn incoming(&mut self, now: Duration, segment: &Segment) -> Vec<Segment> {
        let key = (segment.to, segment.from);
        let Some(case) = self.cases.get_mut(&key) else { return Vec::new() };
        if segment.flags & (flag::RST | flag::SYN) != 0 {
            self.close(key);
            return Vec::new();
        }
        // Without a socket the kernel resets it by itself, as often as it speaks.
        let Some(knowledge) = case.knowledge else { return Vec::new() };
        if segment.flags & flag::ACK == 0 {
            return Vec::new();
        }
        if case.reset.is_some() {
            return vec![reset_of_peer(key, segment)];
        }
        if after(segment.acknowledgement, knowledge.send_end) {
            return self.reset(key, *segment, now);
        }
        let end = segment.sequence.wrapping_add(segment.span());
        let next = knowledge.receive_next;
        let agrees = !after(segment.sequence, next) && !after(next, end);
        let reachable = !after(segment.acknowledgement, case.sent);
        if agrees && reachable {
            self.cases.remove(&key);
            self.verdicts.settled += 1;
        } else if after(segment.sequence, next) || !reachable {
            let since = case.ahead.map_or(now, |(since, _)| since);
            case.ahead = Some((since, *segment));
        }
        Vec::new()
    }

    /// Time has passed. What has to be sent now.
    pub fn tick(&mut self, now: Duration) -> Vec<Segment> {
        let grace = self.grace;
        let overdue = |case: &Case| {
            case.ahead.filter(|(since, _)| case.reset.is_none() && now >= *since + grace)
        };
        let late: Vec<_> =
            self.cases.iter().filter_map(|(key, case)| Some((*key, overdue(case)?.1))).collect();
        let mut segments = Vec::new();
        for (key, segment) in late {
            segments.extend(self.reset(key, segment, now));
        }
        // Whoever is silent after that has heard it.
        self.cases.retain(|_, case| case.reset.is_none() || case.probes <= PROBES_AFTER_RESET);
        for ((local, remote), case) in &mut self.cases {
            let since = case.reset.unwrap_or_default();
            if PROBES.get(case.probes).is_some_and(|due| now >= since + *due) {
                case.probes += 1;
                segments.push(probe(*local, *remote, case.knowledge));
            }
        }
        segments
    }

    /// The peer has no such connection, or another one.
    fn close(&mut self, key: (SocketAddr, SocketAddr)) {
        let case = self.cases.remove(&key);
        self.verdicts.reset += usize::from(case.is_some_and(|case| case.reset.is_none()));
    }

    /// Ends a connection on both sides, with numbers that both accept (RFC 5961): `segment` is
    /// what the peer said last.
    fn reset(
        &mut self,
        key: (SocketAddr, SocketAddr),
        segment: Segment,
        now: Duration,
    ) -> Vec<Segment> {
        let Some(case) = self.cases.get_mut(&key) else { return Vec::new() };
        self.verdicts.reset += 1;
        (case.reset, case.probes) = (Some(now), 1);
        let (local, remote) = key;
        let to_peer = reset_of_peer(key, &segment);
        let to_guest = case.knowledge.map(|knowledge| Segment {
            from: remote,
            to: local,
            sequence: knowledge.receive_next,
            acknowledgement: case.sent,
            ..to_peer
        });
        std::iter::once(to_peer).chain(to_guest).collect()
    }
}

/// Ends a connection at its peer, which has said this.
fn reset_of_peer((local, remote): (SocketAddr, SocketAddr), said: &Segment) -> Segment {
    Segment {
        from: local,
        to: remote,
        sequence: said.acknowledgement,
        acknowledgement: said.sequence.wrapping_add(said.span()),
        flags: flag::RST | flag::ACK,
        window: 0,
        payload_bytes: 0,
    }
}

/// A segment from the past, which the peer answers with its numbers.
fn probe(local: SocketAddr, remote: SocketAddr, knowledge: Option<Knowledge>) -> Segment {
    let (sequence, acknowledgement, window) = match knowledge {
        Some(known) => {
            (known.send_unacknowledged.wrapping_sub(1), known.receive_next, known.window)
        }
        None => (0, 0, 1),
    };
    Segment {
        from: local,
        to: remote,
        sequence,
        acknowledgement,
        flags: flag::ACK,
        window,
        payload_bytes: 0,
    }
}

/// Watches the connections of a ghost that has just gone live.
#[derive(Debug)]
pub struct GoLiveWatch {
    tap: PacketTap,
    sender: SegmentSender,
    judge: Judge,
}

impl GoLiveWatch {
    /// Opens the watch in the calling thread's network namespace, the ghost's, *before* its
    /// connections leave repair mode. `None` where there is nothing to watch. `callers` are
    /// connections that the primary had, local and remote address; those that are not among
    /// `files` are reset. `outage`: how long ago the primary was last known to be alive; rather
    /// more than less. `exact`: no peer has seen more than `files` say, so whoever is ahead has
    /// only to send again.
    pub fn open(
        files: &[OpenFile],
        callers: &[(SocketAddr, SocketAddr)],
        outage: Duration,
        exact: bool,
    ) -> Result<Option<Self>, KernelError> {
        let mut connections = Watched::of(files);
        let known: HashSet<_> = connections.iter().map(|one| (one.local, one.remote)).collect();
        let unknown = callers.iter().filter(|ends| !known.contains(ends));
        connections.extend(unknown.map(|(local, remote)| Watched {
            local: *local,
            remote: *remote,
            knowledge: None,
        }));
        connections.retain(|watched| !exact || watched.knowledge.is_none());
        if connections.is_empty() {
            return Ok(None);
        }
        let (tap, sender) = (PacketTap::open(TAP_BYTES)?, SegmentSender::open()?);
        Ok(Some(Self { tap, sender, judge: Judge::new(&connections, outage) }))
    }

    /// Watches until every connection has its verdict, at most `at_most`. From any thread; to be
    /// called when the service address is there.
    pub fn run(mut self, at_most: Duration) -> Result<Verdicts, KernelError> {
        let start = Instant::now();
        let mut ticked = None;
        while !self.judge.is_done() && start.elapsed() < at_most {
            let now = start.elapsed();
            if ticked.is_none_or(|last| now >= last + Duration::from_millis(10)) {
                ticked = Some(now);
                for segment in self.judge.tick(now) {
                    self.send(&segment);
                }
                if self.tap.missed()? > 0 {
                    self.judge.missed_packets();
                }
            }
            self.look(start)?;
        }
        Ok(self.judge.verdicts())
    }

    fn look(&mut self, start: Instant) -> Result<(), KernelError> {
        let Some(seen) = self.tap.next(10)? else { return Ok(()) };
        // What goes over the loopback interface is our own: resets and FINs in a peer's name.
        let segment = Segment::from_packet(&seen.packet).filter(|_| !seen.loopback);
        let Some(segment) = segment else { return Ok(()) };
        if seen.outgoing {
            self.judge.outgoing(start.elapsed(), &segment);
            return Ok(());
        }
        for answer in self.judge.incoming(start.elapsed(), &segment) {
            self.send(&answer);
        }
        Ok(())
    }

    /// An address that cannot be reached now will be asked again.
    fn send(&self, segment: &Segment) {
        let _ = self.sender.send(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: &str = "10.0.0.1:80";
    const PEER: &str = "10.0.0.2:4000";

    fn judge(knowledge: Option<Knowledge>) -> Judge {
        let (local, remote) = (address(LOCAL), address(PEER));
        Judge::new(&[Watched { local, remote, knowledge }], Duration::ZERO)
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn knowledge() -> Knowledge {
        // Across the end of sequence space.
        let send_unacknowledged = u32::MAX - 9;
        let send_end = send_unacknowledged.wrapping_add(100);
        let send_next = send_unacknowledged;
        Knowledge { send_unacknowledged, send_next, send_end, receive_next: 5000, window: 1 }
    }

    fn says(sequence: u32, acknowledgement: u32, payload_bytes: u32) -> Segment {
        Segment {
            from: address(PEER),
            to: address(LOCAL),
            sequence,
            acknowledgement,
            flags: flag::ACK,
            window: 1,
            payload_bytes,
        }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_peer_that_agrees_is_settled() {
        let mut judge = judge(Some(knowledge()));
        let known = knowledge();
        assert!(judge.incoming(at(1), &says(5000, known.send_unacknowledged, 0)).is_empty());
        assert!(judge.is_done());
        assert_eq!(judge.verdicts(), Verdicts { settled: 1, ..Verdicts::default() });
    }

    #[test]
    fn a_peer_that_has_seen_lost_output_is_reset_with_its_own_numbers() {
        let mut judge = judge(Some(knowledge()));
        let answer = judge.incoming(at(1), &says(5000, knowledge().send_end.wrapping_add(1), 0));
        assert_eq!(answer.len(), 2);
        assert_eq!(answer[0].sequence, knowledge().send_end.wrapping_add(1));
        assert_eq!((answer[1].sequence, answer[1].to), (5000, address(LOCAL)));
        assert_eq!(judge.verdicts(), Verdicts { reset: 1, ..Verdicts::default() });
    }

    #[test]
    fn a_reset_that_got_lost_is_repeated_until_the_peer_knows() {
        let mut judge = judge(Some(knowledge()));
        let seen_more = says(5000, knowledge().send_end.wrapping_add(1), 0);
        judge.incoming(at(1), &seen_more);
        assert_eq!(judge.tick(at(70)).len(), 1, "asks whether it knows");
        let again = judge.incoming(at(71), &seen_more);
        assert_eq!(again.len(), 1, "the guest was told the first time");
        assert_eq!((again[0].flags & flag::RST, again[0].to), (flag::RST, address(PEER)));
        assert!(!judge.is_done());
        judge.incoming(at(72), &Segment { flags: flag::RST, ..seen_more });
        assert!(judge.is_done());
        assert_eq!(judge.verdicts(), Verdicts { reset: 1, ..Verdicts::default() });
    }

    #[test]
    fn a_peer_that_was_reset_may_call_again_from_the_same_port() {
        let mut judge = judge(Some(knowledge()));
        judge.incoming(at(1), &says(5000, knowledge().send_end.wrapping_add(1), 0));
        judge.incoming(at(2), &Segment { flags: flag::SYN, ..says(9, 0, 0) });
        assert!(judge.incoming(at(3), &says(10, 77, 0)).is_empty());
        assert!(judge.is_done());
    }

    #[test]
    fn a_caller_that_no_checkpoint_knows_is_asked_until_the_kernel_has_reset_it() {
        let mut judge = judge(None);
        assert_eq!(judge.tick(at(0)).len(), 1);
        assert!(judge.incoming(at(1), &says(10, 77, 0)).is_empty());
        let kernel = Segment { from: address(LOCAL), to: address(PEER), ..says(77, 0, 0) };
        judge.outgoing(at(1), &Segment { flags: flag::RST, ..kernel });
        assert_eq!(judge.verdicts(), Verdicts { reset: 1, ..Verdicts::default() });
        let asked: usize = (1..500).map(|tick| judge.tick(at(tick * 10)).len()).sum();
        assert_eq!(asked, PROBES_AFTER_RESET);
        assert!(judge.is_done());
    }

    #[test]
    fn a_peer_that_is_ahead_may_catch_us_up() {
        let mut judge = judge(Some(knowledge()));
        let known = knowledge();
        judge.incoming(at(1), &says(5100, known.send_unacknowledged, 0));
        assert!(judge.tick(at(500)).iter().all(|segment| segment.flags & flag::RST == 0));
        judge.incoming(at(600), &says(5000, known.send_unacknowledged, 100));
        assert_eq!(judge.verdicts().settled, 1);
    }

    #[test]
    fn a_peer_that_stays_ahead_is_reset() {
        let mut judge = judge(Some(knowledge()));
        judge.incoming(at(1), &says(5100, knowledge().send_unacknowledged, 0));
        judge.incoming(at(300), &says(5100, knowledge().send_unacknowledged, 50));
        let resets = judge.tick(at(701));
        assert!(resets.iter().any(|segment| segment.flags & flag::RST != 0));
        assert_eq!(judge.verdicts(), Verdicts { reset: 1, ..Verdicts::default() });
    }

    #[test]
    fn bytes_in_the_queue_are_not_beyond_what_the_ghost_knows() {
        let mut judge = judge(Some(knowledge()));
        let half = knowledge().send_unacknowledged.wrapping_add(50);
        // Acknowledged before the ghost has sent it (again): unclear, until it has.
        assert!(judge.incoming(at(1), &says(5000, half, 0)).is_empty());
        assert!(!judge.is_done());
        let sent = Segment {
            from: address(LOCAL),
            to: address(PEER),
            ..says(knowledge().send_unacknowledged, 5000, 100)
        };
        judge.outgoing(at(1), &sent);
        judge.incoming(at(2), &says(5000, half, 0));
        assert_eq!(judge.verdicts().settled, 1);
    }

    #[test]
    fn a_quiet_peer_is_asked_and_left_alone() {
        let mut judge = judge(Some(knowledge()));
        let asked: usize = (0..1500).map(|tick| judge.tick(at(tick * 10)).len()).sum();
        assert_eq!(asked, PROBES.len());
        assert_eq!(judge.verdicts(), Verdicts { silent: 1, ..Verdicts::default() });
    }
}
