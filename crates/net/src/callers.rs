//! Connections of a guest that no checkpoint knows yet.
//!
//! A connection that began after the last checkpoint, or that the guest has not accepted, is
//! unknown to the ghost. If the primary's kernel has acknowledged all that the client sent, the
//! client waits for a reply and says nothing more: nobody would ever tell it that its connection
//! is gone. So the primary passes on each packet that begins or ends a connection, at once and
//! outside of checkpoints, and the spare keeps a list for
//! [`GoLiveWatch`](crate::go_live::GoLiveWatch), which asks these clients; their answers are reset.
//!
//! Nobody waits for this list: a connection that began within the last instant of the primary's
//! life may be missing. Under `timeline` nothing is ever held back for a spare.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use hotspare_kernel::segment::{Segment, flag, unmapped};

/// More are forgotten, oldest first.
const CALLERS_MAX: usize = 65_536;

/// Local and remote address of a connection.
type Ends = (SocketAddr, SocketAddr);

/// The open connections, as far as their first and last packets tell.
#[derive(Debug)]
pub struct Callers {
    service: IpAddr,
    made: u64,
    by_age: BTreeMap<u64, Ends>,
    open: HashMap<Ends, Caller>,
}

#[derive(Debug)]
struct Caller {
    number: u64,
    /// Which ends have said FIN.
    guest_done: bool,
    peer_done: bool,
}

impl Callers {
    /// Nobody has called yet at this address.
    #[must_use]
    pub fn new(service: IpAddr) -> Self {
        Self { service, made: 0, by_age: BTreeMap::new(), open: HashMap::new() }
    }

    /// A packet of the guest's interface, from its IP header on. What says nothing is ignored.
    pub fn note(&mut self, packet: &[u8]) {
        let Some(segment) = Segment::from_packet(packet) else { return };
        let service = unmapped(self.service);
        let from_guest = segment.from.ip() == service;
        if !from_guest && segment.to.ip() != service {
            return;
        }
        let ends = match from_guest {
            true => (segment.from, segment.to),
            false => (segment.to, segment.from),
        };
        let has = |bit| segment.flags & bit != 0;
        if has(flag::RST) {
            self.forget(ends);
        } else if has(flag::SYN) && has(flag::ACK) {
            self.forget(ends);
            self.add(ends);
        } else if has(flag::FIN)
            && let Some(caller) = self.open.get_mut(&ends)
        {
            let done = if from_guest { &mut caller.guest_done } else { &mut caller.peer_done };
            *done = true;
            if caller.guest_done && caller.peer_done {
                self.forget(ends);
            }
        }
    }

    fn add(&mut self, ends: Ends) {
        let number = self.made;
        self.made += 1;
        self.by_age.insert(number, ends);
        self.open.insert(ends, Caller { number, guest_done: false, peer_done: false });
        if self.open.len() > CALLERS_MAX
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.open.remove(&oldest);
        }
    }

    fn forget(&mut self, ends: Ends) {
        if let Some(caller) = self.open.remove(&ends) {
            self.by_age.remove(&caller.number);
        }
    }

    /// Those that are open, local and remote address, oldest first.
    pub fn open(&self) -> impl Iterator<Item = (SocketAddr, SocketAddr)> {
        self.by_age.values().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: &str = "[fd00::1]:80";

    fn says(from: &str, to: &str, flags: u8) -> Vec<u8> {
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        let (sequence, acknowledgement, window, payload_bytes) = (1, 2, 3, 0);
        let segment = Segment { from, to, sequence, acknowledgement, flags, window, payload_bytes };
        segment.to_packet().unwrap()
    }

    fn peer(number: usize) -> String {
        format!("[fd00::{:x}]:{}", 2 + number / 50_000, 1000 + number % 50_000)
    }

    fn callers() -> Callers {
        Callers::new("fd00::1".parse().unwrap())
    }

    #[test]
    fn a_connection_is_open_until_both_ends_have_said_so_or_one_resets() {
        let mut callers = callers();
        let (one, other) = (peer(1), peer(2));
        callers.note(&says(GUEST, &one, flag::SYN | flag::ACK));
        // The guest calls somebody.
        callers.note(&says(&other, GUEST, flag::SYN | flag::ACK));
        assert_eq!(callers.open().count(), 2);
        callers.note(&says(GUEST, &one, flag::FIN | flag::ACK));
        callers.note(&says(GUEST, &one, flag::FIN | flag::ACK));
        assert_eq!(callers.open().count(), 2);
        callers.note(&says(&one, GUEST, flag::FIN | flag::ACK));
        let left: Vec<_> = callers.open().collect();
        assert_eq!(left, [(GUEST.parse().unwrap(), other.parse().unwrap())]);
        callers.note(&says(GUEST, &other, flag::RST));
        assert_eq!(callers.open().count(), 0);
    }

    #[test]
    fn packets_of_others_and_damaged_ones_say_nothing() {
        let mut callers = callers();
        callers.note(&says(&peer(1), &peer(2), flag::SYN | flag::ACK));
        let packet = says(GUEST, &peer(1), flag::SYN | flag::ACK);
        for length in 0..40 + 14 {
            callers.note(&packet[..length]);
        }
        assert_eq!(callers.open().count(), 0);
    }

    #[test]
    fn the_oldest_are_forgotten_when_there_are_too_many() {
        let mut callers = callers();
        for number in 0..CALLERS_MAX + 10 {
            callers.note(&says(GUEST, &peer(number), flag::SYN | flag::ACK));
        }
        assert_eq!(callers.open().count(), CALLERS_MAX);
        let first = callers.open().next().unwrap();
        assert_eq!(first.1, peer(10).parse().unwrap());
    }
}
