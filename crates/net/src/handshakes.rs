//! Connections that clients ask for, until they can go on elsewhere.
//!
//! A connection in the middle of its handshake, or that the guest has not accepted, cannot be
//! captured: its socket has no descriptor. So with a spare in the path no client gets to know of
//! one before a checkpoint has it. The guest's kernel is told at once that its SYN-ACK has arrived:
//! it makes the socket, and the guest can accept it. The SYN-ACK itself waits for the checkpoint
//! that has the socket, and leaves with it.
//!
//! ```text
//! client ── SYN ──▶ guest ── SYN-ACK ──▶ kept here
//!                   guest ◀──── ACK ──── in the client's name
//!                   guest accepts; a checkpoint has the connection
//! client ◀──────────────────── SYN-ACK ── with that checkpoint
//! ```
//!
//! If the host dies before, the SYN is given to the ghost, which knows nothing of it: a new
//! handshake. Since the guest's kernel counts the handshake as over, it would not answer a SYN that
//! is repeated because the SYN-ACK got lost on its way: that is answered here, until the client has
//! said something else.
//!
//! A guest that does not accept in time (`PATIENCE`), one that waits for data first
//! (`TCP_DEFER_ACCEPT`) or closes at once has its SYN-ACK sent all the same. Such a connection
//! breaks if the host dies before the guest has accepted it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotspare_image::objects::{Object, OpenFile};
use hotspare_image::sockets::{TcpSocket, TcpState};
use hotspare_kernel::segment::{Segment, flag, unmapped};
use hotspare_kernel::tun::HEADER_BYTES;

/// How long a guest may take to accept. Under load checkpoints are 50 ms apart, and a guest that
/// stands still for one does not accept: with 50 ms connections broke in 4 of 30 deaths of a
/// saturated nginx. A client loses nothing: nobody would answer it earlier.
const PATIENCE: Duration = Duration::from_secs(1);
/// How soon a guest is expected to have accepted.
const ACCEPTS_WITHIN: Duration = Duration::from_micros(300);
/// So many clients at once may have asked, or not have been heard since they were answered. More
/// are left to the guest's kernel, which knows what to do in a flood of SYNs: whoever is kept here
/// has a socket before it has shown that it exists.
const CLIENTS_MAX: usize = 1024;
/// Nobody waits longer for a connection than that (`tcp_syn_retries`, tcp(7)).
const FORGOTTEN_AFTER: Duration = Duration::from_secs(130);

/// Address of the guest and of the client.
pub type Ends = (SocketAddr, SocketAddr);

/// Ports of a checkpoint where connections are accepted only with their first data.
pub fn deferring(files: &[OpenFile]) -> Vec<u16> {
    const TCP_DEFER_ACCEPT: (i32, i32) = (6, 9);
    let defers = |socket: &TcpSocket| {
        let TcpState::Listening { .. } = &socket.state else { return None };
        let mut options = socket.options.iter();
        let set = options.any(|option| (option.level, option.name) == TCP_DEFER_ACCEPT);
        Some(socket.local.as_ref()?.internet()?.port()).filter(|_| set)
    };
    let port = |file: &OpenFile| match &file.object {
        Object::Tcp(socket) => defers(socket),
        _ => None,
    };
    files.iter().filter_map(port).collect()
}

/// The connections of a checkpoint, as their packets name them.
pub fn connections(files: &[OpenFile]) -> impl Iterator<Item = Ends> {
    let ends = |socket: &TcpSocket| {
        let plain = |address: SocketAddr| SocketAddr::new(unmapped(address.ip()), address.port());
        let TcpState::Connected(connection) = &socket.state else { return None };
        let local = socket.local.as_ref()?.internet()?;
        Some((plain(local), plain(connection.remote.internet()?)))
    };
    files.iter().filter_map(move |file| match &file.object {
        Object::Tcp(socket) => ends(socket),
        _ => None,
    })
}

fn segment(packet: &[u8]) -> Option<Segment> {
    Segment::from_packet(packet.get(HEADER_BYTES..)?)
}

fn asks(segment: &Segment) -> bool {
    segment.flags & (flag::SYN | flag::ACK) == flag::SYN
}

fn agrees(segment: &Segment) -> bool {
    segment.flags & (flag::SYN | flag::ACK) == flag::SYN | flag::ACK
}

/// SYNs without an answer, and answers that may not have arrived.
#[derive(Debug, Default)]
pub struct Handshakes {
    asked: HashMap<Ends, Asked>,
    answered: HashMap<Ends, Answered>,
}

#[derive(Debug)]
struct Asked {
    number: u64,
    packet: Arc<[u8]>,
    since: Instant,
}

/// A SYN-ACK that has left.
#[derive(Clone, Debug)]
struct Answered {
    /// Of the SYN.
    sequence: u32,
    packet: Arc<[u8]>,
    since: Instant,
}

/// Whether there is room for one more, if need be after the oldest have been forgotten.
fn has_room<T>(table: &mut HashMap<Ends, T>, now: Instant, since: fn(&T) -> Instant) -> bool {
    if table.len() >= CLIENTS_MAX {
        table.retain(|_, one| now < since(one) + FORGOTTEN_AFTER);
    }
    table.len() < CLIENTS_MAX
}

impl Handshakes {
    /// A packet of a client, and its number; a SYN-ACK that it is to be answered with, instead of
    /// by the guest.
    pub fn came(&mut self, number: u64, packet: &[u8]) -> Option<Arc<[u8]>> {
        let segment = segment(packet)?;
        let ends = (segment.to, segment.from);
        if !asks(&segment) {
            self.answered.remove(&ends);
            if segment.flags & flag::RST != 0 {
                self.asked.remove(&ends);
            }
            return None;
        }
        if let Some(answered) = self.answered.get(&ends) {
            if answered.sequence == segment.sequence {
                return Some(Arc::clone(&answered.packet));
            }
            self.answered.remove(&ends);
        }
        let since = Instant::now();
        if has_room(&mut self.asked, since, |asked| asked.since) {
            self.asked.insert(ends, Asked { number, packet: packet.into(), since });
        }
        None
    }

    /// A packet leaves to a client.
    pub fn left(&mut self, packet: &[u8]) {
        let Some(segment) = segment(packet) else { return };
        let ends = (segment.from, segment.to);
        if segment.flags & flag::RST != 0 {
            self.asked.remove(&ends);
        }
        // An answer to a SYN of the guest's own is of no interest, nor is anything else.
        if agrees(&segment) && self.asked.remove(&ends).is_some() {
            let sequence = segment.acknowledgement.wrapping_sub(1);
            let since = Instant::now();
            if has_room(&mut self.answered, since, |answered| answered.since) {
                self.answered.insert(ends, Answered { sequence, packet: packet.into(), since });
            }
        }
    }

    /// Whether one more client may be answered before it has shown that it exists.
    pub fn has_room(&mut self) -> bool {
        has_room(&mut self.answered, Instant::now(), |answered| answered.since)
    }

    /// Whether there is nothing to answer.
    pub fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.answered.is_empty()
    }

    /// SYNs without an answer that came before packet `number`.
    pub fn unanswered(&self, number: u64) -> Vec<Arc<[u8]>> {
        let old = self.asked.values().filter(|asked| asked.number < number);
        old.map(|asked| Arc::clone(&asked.packet)).collect()
    }
}

/// SYN-ACKs that wait for their connections to be in a checkpoint.
#[derive(Debug, Default)]
pub struct Threshold {
    /// What SYNs have said that have entered the guest.
    asked: HashMap<Ends, Syn>,
    pending: HashMap<Ends, Pending>,
    /// Ports where connections are accepted only with their first data.
    deferring: Vec<u16>,
}

#[derive(Debug)]
struct Syn {
    window: u32,
    scale: u32,
    since: Instant,
}

#[derive(Debug)]
struct Pending {
    /// Of the SYN.
    sequence: u32,
    /// The SYN-ACK and what the guest has said after it.
    packets: Vec<Box<[u8]>>,
    since: Instant,
}

/// What is to become of a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes on.
    Passes,
    /// It is kept here, or of no use.
    Kept,
    /// It is kept here, and this is to be said to the guest in the client's name.
    Answered(Vec<u8>),
    /// All of these leave, and it after them.
    Releases(Vec<Box<[u8]>>),
}

impl Threshold {
    /// A packet enters the guest; false if it must not. What a SYN leads to `may_wait` here; else
    /// it is the kernel's alone.
    pub fn enters(&mut self, packet: &[u8], may_wait: impl FnOnce() -> bool) -> bool {
        let Some(segment) = segment(packet) else { return true };
        let ends = (segment.to, segment.from);
        if asks(&segment) {
            if self.pending.get(&ends).is_some_and(|known| known.sequence == segment.sequence) {
                return false;
            }
            self.pending.remove(&ends);
            let since = Instant::now();
            if may_wait() && has_room(&mut self.asked, since, |syn| syn.since) {
                let scale = u32::from(window_scale(packet).unwrap_or(0).min(14));
                let window = u32::from(segment.window);
                self.asked.insert(ends, Syn { window, scale, since });
            }
        } else if segment.flags & flag::RST != 0 {
            self.pending.remove(&ends);
            self.asked.remove(&ends);
        }
        true
    }

    /// A packet leaves the guest.
    pub fn leaves(&mut self, packet: &[u8], now: Instant) -> Fate {
        if self.asked.is_empty() && self.pending.is_empty() {
            return Fate::Passes;
        }
        let Some(segment) = segment(packet) else { return Fate::Passes };
        let ends = (segment.from, segment.to);
        if agrees(&segment) {
            let asked = self.asked.remove(&ends);
            let Some(syn) = asked.filter(|_| self.keeps(segment.from.port())) else {
                return Fate::Passes;
            };
            let Some(answer) = in_the_clients_name(&segment, syn.window, syn.scale) else {
                return Fate::Passes;
            };
            let sequence = segment.acknowledgement.wrapping_sub(1);
            let pending = Pending { sequence, packets: vec![packet.into()], since: now };
            self.pending.insert(ends, pending);
            return Fate::Answered(answer);
        }
        if segment.flags & (flag::RST | flag::FIN) != 0 {
            self.asked.remove(&ends);
            let released = self.pending.remove(&ends);
            return released.map_or(Fate::Passes, |pending| Fate::Releases(pending.packets));
        }
        let Some(pending) = self.pending.get_mut(&ends) else { return Fate::Passes };
        pending.packets.push(packet.into());
        Fate::Kept
    }

    fn keeps(&self, port: u16) -> bool {
        self.pending.len() < CLIENTS_MAX && !self.deferring.contains(&port)
    }

    /// Whether something waits.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Ports where connections are accepted only with their first data.
    pub fn set_deferring(&mut self, ports: Vec<u16>) {
        self.deferring = ports;
    }

    /// A checkpoint has these connections: what waited for that.
    pub fn covered(&mut self, connections: impl Iterator<Item = Ends>) -> Vec<Box<[u8]>> {
        let known = connections.filter_map(|ends| self.pending.remove(&ends));
        known.flat_map(|pending| pending.packets).collect()
    }

    /// What has waited too long, or everything.
    pub fn give_up(&mut self, now: Option<Instant>) -> Vec<Box<[u8]>> {
        let late = |pending: &Pending| now.is_none_or(|now| now >= pending.since + PATIENCE);
        let given_up = self.pending.extract_if(|_, pending| late(pending));
        given_up.flat_map(|(_, pending)| pending.packets).collect()
    }

    /// When a checkpoint is likely to have one more of them.
    pub fn wants(&self, now: Instant) -> Option<Instant> {
        let youngest = self.pending.values().map(|pending| pending.since).max()?;
        // The longer it takes the less often it is tried.
        Some(now + ((now - youngest) / 2).max(ACCEPTS_WITHIN))
    }
}

/// Says to the guest that its SYN-ACK has arrived, as its client will.
fn in_the_clients_name(agreed: &Segment, window: u32, scale: u32) -> Option<Vec<u8>> {
    let segment = Segment {
        from: agreed.to,
        to: agreed.from,
        sequence: agreed.acknowledgement,
        acknowledgement: agreed.sequence.wrapping_add(1),
        flags: flag::ACK,
        window: (window >> scale).max(1) as u16,
        payload_bytes: 0,
    };
    Some([&[0; HEADER_BYTES][..], &segment.to_packet()?].concat())
}

/// The option of a SYN (RFC 7323, 2.2), whose packet has its header before it.
fn window_scale(packet: &[u8]) -> Option<u8> {
    let packet = packet.get(HEADER_BYTES..)?;
    let start = match packet.first()? >> 4 {
        4 => usize::from(packet[0] & 15) * 4,
        _ => 40,
    };
    let end = start + usize::from(packet.get(start + 12)? >> 4) * 4;
    let mut options = packet.get(start + 20..end)?;
    loop {
        match *options {
            [3, 3, scale, ..] => return Some(scale),
            [1, ref rest @ ..] => options = rest,
            [0, ..] | [] => return None,
            [_, length, ..] if length >= 2 => options = options.get(usize::from(length)..)?,
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: &str = "10.0.0.50:80";
    const CLIENT: &str = "10.0.0.9:4000";

    fn packet(from_guest: bool, flags: u8, sequence: u32, acknowledgement: u32) -> Arc<[u8]> {
        let (guest, client) = (GUEST.parse().unwrap(), CLIENT.parse().unwrap());
        let (from, to) = if from_guest { (guest, client) } else { (client, guest) };
        let (window, payload_bytes) = (64_000, 0);
        let segment = Segment { from, to, sequence, acknowledgement, flags, window, payload_bytes };
        [&[0; HEADER_BYTES][..], &segment.to_packet().unwrap()].concat().into()
    }

    fn syn() -> Arc<[u8]> {
        packet(false, flag::SYN, 7, 0)
    }

    fn syn_ack() -> Arc<[u8]> {
        packet(true, flag::SYN | flag::ACK, 90, 8)
    }

    fn ends() -> Ends {
        (GUEST.parse().unwrap(), CLIENT.parse().unwrap())
    }

    #[test]
    fn a_syn_ack_waits_for_a_checkpoint_with_its_connection() {
        let (mut threshold, now) = (Threshold::default(), Instant::now());
        assert!(threshold.enters(&syn(), || true));
        let Fate::Answered(answer) = threshold.leaves(&syn_ack(), now) else { panic!("passes") };
        assert_eq!(*answer, *packet_with_window(8, 91, 64_000));
        assert!(!threshold.enters(&syn(), || true), "the guest knows");
        let banner = packet(true, flag::ACK, 91, 8);
        assert_eq!(threshold.leaves(&banner, now), Fate::Kept);
        assert!(threshold.covered(std::iter::empty()).is_empty());
        let left = threshold.covered(std::iter::once(ends()));
        assert_eq!(left, [Box::from(&*syn_ack()), Box::from(&*banner)]);
        assert_eq!(threshold.leaves(&banner, now), Fate::Passes);
        assert!(threshold.is_empty());
    }

    fn packet_with_window(sequence: u32, acknowledgement: u32, window: u16) -> Vec<u8> {
        let (to, from) = ends();
        let (flags, payload_bytes) = (flag::ACK, 0);
        let segment = Segment { from, to, sequence, acknowledgement, flags, window, payload_bytes };
        [&[0; HEADER_BYTES][..], &segment.to_packet().unwrap()].concat()
    }

    #[test]
    fn nobody_waits_for_a_guest_that_does_not_accept_or_closes() {
        let (mut threshold, now) = (Threshold::default(), Instant::now());
        threshold.enters(&syn(), || true);
        threshold.leaves(&syn_ack(), now);
        assert!(threshold.give_up(Some(now)).is_empty());
        assert_eq!(threshold.give_up(Some(now + PATIENCE)), [Box::from(&*syn_ack())]);
        threshold.enters(&syn(), || true);
        threshold.leaves(&syn_ack(), now);
        let fin = packet(true, flag::FIN | flag::ACK, 91, 8);
        assert_eq!(threshold.leaves(&fin, now), Fate::Releases(vec![Box::from(&*syn_ack())]));
        threshold.set_deferring(vec![80]);
        threshold.enters(&syn(), || true);
        assert_eq!(threshold.leaves(&syn_ack(), now), Fate::Passes);
    }

    /// Whoever does not exist must not have more than that.
    #[test]
    fn a_flood_of_syns_is_left_to_the_kernel() {
        let (mut handshakes, mut threshold) = (Handshakes::default(), Threshold::default());
        for client in 0..CLIENTS_MAX + 10 {
            let from = SocketAddr::from(([10, 1, (client >> 8) as u8, client as u8], 4000));
            let to = GUEST.parse().unwrap();
            let (flags, window, payload_bytes) = (flag::SYN, 64_000, 0);
            let (sequence, acknowledgement) = (7, 0);
            let syn = Segment { from, to, sequence, acknowledgement, flags, window, payload_bytes };
            let agreed = Segment {
                from: to,
                to: from,
                flags: flag::SYN | flag::ACK,
                acknowledgement: 8,
                ..syn
            };
            let [syn, agreed] = [syn, agreed]
                .map(|segment| [&[0; HEADER_BYTES][..], &segment.to_packet().unwrap()].concat());
            let kept = handshakes.has_room();
            assert_eq!(kept, client < CLIENTS_MAX);
            handshakes.came(1, &syn);
            assert!(threshold.enters(&syn, || kept));
            let fate = threshold.leaves(&agreed, Instant::now());
            assert_eq!(matches!(fate, Fate::Answered(_)), kept);
            handshakes.left(&agreed);
        }
        assert_eq!(handshakes.answered.len(), CLIENTS_MAX);
    }

    #[test]
    fn a_guest_that_calls_somebody_is_left_alone() {
        let (mut threshold, now) = (Threshold::default(), Instant::now());
        assert_eq!(threshold.leaves(&packet(true, flag::SYN, 1, 0), now), Fate::Passes);
        assert!(threshold.enters(&packet(false, flag::SYN | flag::ACK, 5, 2), || true));
        assert_eq!(threshold.leaves(&packet(true, flag::ACK, 2, 6), now), Fate::Passes);
    }

    #[test]
    fn a_repeated_syn_is_answered_again_until_the_client_has_heard() {
        let mut handshakes = Handshakes::default();
        assert_eq!(handshakes.came(1, &syn()), None);
        assert_eq!(handshakes.came(2, &syn()), None);
        assert_eq!(handshakes.unanswered(3), [syn()]);
        assert!(handshakes.unanswered(2).is_empty(), "it is in the log");
        handshakes.left(&syn_ack());
        assert!(handshakes.unanswered(9).is_empty());
        assert_eq!(handshakes.came(4, &syn()), Some(syn_ack()));
        // Another connection from the same port.
        assert_eq!(handshakes.came(5, &packet(false, flag::SYN, 700, 0)), None);
        handshakes.left(&packet(true, flag::SYN | flag::ACK, 1, 701));
        handshakes.came(6, &packet(false, flag::ACK, 701, 2));
        assert_eq!(handshakes.came(7, &packet(false, flag::SYN, 700, 0)), None);
    }

    #[test]
    fn the_scale_of_a_window_is_found_among_the_options() {
        let mut packet = syn().to_vec();
        assert_eq!(window_scale(&packet), None);
        packet.extend([2, 4, 5, 0xb4, 1, 3, 3, 9]);
        packet[HEADER_BYTES + 20 + 12] = 7 << 4;
        assert_eq!(window_scale(&packet), Some(9));
        for length in 0..packet.len() {
            let _ = window_scale(&packet[..length]);
        }
    }
}
