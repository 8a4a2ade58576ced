//! Long runs of what reads packets on packets that nobody sane would send: `cargo xtask fuzz`.
//!
//! Clients, servers and whoever is between them say anything: handshakes in any order, repeated,
//! cut, with numbers that fit or do not. What is kept is counted against what is let go.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hotspare_kernel::segment::{Segment, flag, source};
use hotspare_kernel::tun::HEADER_BYTES;
use hotspare_replica::fuzz::Dice;

use crate::callers::Callers;
use crate::handshakes::{Ends, Fate, Handshakes, Threshold};

/// Where the guest serves, over either protocol.
const SERVICES: [&str; 2] = ["10.0.0.50:6379", "[fd00::50]:6379"];
/// Packets of a case.
const PACKETS: usize = 60;
/// Clients of a case: few, so that they meet themselves again.
const CLIENTS: u16 = 4;

fn segment(from_guest: bool, roll: &mut dyn FnMut() -> u64) -> Segment {
    let six = roll().is_multiple_of(4);
    let service: SocketAddr = SERVICES[usize::from(six)].parse().expect("an address");
    let port = 1000 + (roll() % u64::from(CLIENTS)) as u16;
    let client =
        if six { IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 9]) } else { [10, 0, 0, 9].into() };
    let client = SocketAddr::new(client, port);
    let flags = [
        flag::SYN,
        flag::SYN | flag::ACK,
        flag::ACK,
        flag::ACK | flag::FIN,
        flag::RST,
        flag::RST | flag::ACK,
        roll() as u8,
    ];
    let (from, to) = if from_guest { (service, client) } else { (client, service) };
    Segment {
        from,
        to,
        // Few numbers, so that some fit.
        sequence: (roll() % 3) as u32,
        acknowledgement: (roll() % 3) as u32,
        flags: flags[(roll() % flags.len() as u64) as usize],
        window: roll() as u16,
        payload_bytes: 0,
    }
}

/// A packet with the header that travels before it: whole, with a payload, damaged, or noise.
fn packet(from_guest: bool, roll: &mut dyn FnMut() -> u64) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend(segment(from_guest, roll).to_packet().unwrap_or_default());
    match roll() % 16 {
        0 => packet.truncate(roll() as usize % (packet.len() + 1)),
        1 | 2 => {
            let at = roll() as usize % packet.len();
            packet[at] = roll() as u8;
        }
        3 => packet.extend((0..roll() % 40).map(|byte| byte as u8)),
        4 => packet = (0..roll() % 80).map(|_| roll() as u8).collect(),
        _ => {}
    }
    packet
}

fn ends_of(packet: &[u8], from_guest: bool) -> Option<(Segment, Ends)> {
    let segment = Segment::from_packet(packet.get(HEADER_BYTES..)?)?;
    let ends = match from_guest {
        true => (segment.from, segment.to),
        false => (segment.to, segment.from),
    };
    Some((segment, ends))
}

/// A case: whether some packet was no TCP at all, and how many were kept and let go again.
///
/// # Panics
/// If a packet that is kept gets lost or comes twice, if something of a connection that waits gets
/// out before it, or if what is said in a client's name is no answer to what the guest said.
#[must_use]
pub fn packets(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed);
    let mut roll = move || dice.roll();
    let mut threshold = Threshold::default();
    let mut handshakes = Handshakes::default();
    let mut callers = Callers::new([10, 0, 0, 50].into());
    let mut kept: HashMap<Ends, usize> = HashMap::new();
    let (mut strange, mut released) = (false, 0);
    let mut now = Instant::now();
    for number in 0..PACKETS as u64 {
        let from_guest = roll().is_multiple_of(2);
        // Now and then one that looks as if it came from the other side.
        let packet = packet(from_guest ^ roll().is_multiple_of(16), &mut roll);
        callers.note(packet.get(HEADER_BYTES..).unwrap_or_default());
        let _ = source(packet.get(HEADER_BYTES..).unwrap_or_default());
        let known = ends_of(&packet, from_guest);
        strange |= known.is_none();
        now += Duration::from_millis(roll() % 20);
        if !from_guest {
            if let Some(answer) = handshakes.came(number, &packet) {
                let answered = ends_of(&answer, true);
                let to = known.map(|(_, ends)| ends);
                assert_eq!(answered.map(|(_, ends)| ends), to, "answered for somebody else");
            }
            let entered = threshold.enters(&packet, || true);
            if entered && let Some((segment, ends)) = known {
                let renews = segment.flags & (flag::SYN | flag::ACK) == flag::SYN;
                if renews || segment.flags & flag::RST != 0 {
                    // What waited of the connection before is of no use any more.
                    kept.remove(&ends);
                }
            }
            continue;
        }
        handshakes.left(&packet);
        let fate = threshold.leaves(&packet, now);
        released += account(fate, known, &mut kept) as u64;
        if roll().is_multiple_of(8) {
            let out = threshold.give_up(Some(now));
            released += settle(out, &mut kept) as u64;
        }
        if roll().is_multiple_of(16) {
            let some: Vec<Ends> = kept.keys().take(1).copied().collect();
            let out = threshold.covered(some.into_iter());
            released += settle(out, &mut kept) as u64;
        }
        let _ = threshold.wants(now);
        let _ = handshakes.unanswered(number / 2);
    }
    released += settle(threshold.give_up(None), &mut kept) as u64;
    assert!(kept.is_empty() && threshold.is_empty(), "packets are lost: {kept:?}");
    (strange, released)
}

/// Keeps account of one that leaves the guest; how many got out that had been kept.
fn account(fate: Fate, known: Option<(Segment, Ends)>, kept: &mut HashMap<Ends, usize>) -> usize {
    let Some((segment, ends)) = known else {
        assert_eq!(fate, Fate::Passes, "what is no TCP is nobody's");
        return 0;
    };
    match fate {
        Fate::Passes => {
            let overtakes = kept.contains_key(&ends)
                // A second SYN-ACK says what the first does.
                && segment.flags & (flag::SYN | flag::ACK) != flag::SYN | flag::ACK;
            assert!(!overtakes, "{segment:?} overtakes what waits of its connection");
            0
        }
        Fate::Kept => {
            *kept.get_mut(&ends).expect("something before it is kept") += 1;
            0
        }
        Fate::Answered(answer) => {
            let (said, of) = ends_of(&answer, false).expect("the answer is TCP");
            assert_eq!((of, said.flags), (ends, flag::ACK));
            assert_eq!(said.acknowledgement, segment.sequence.wrapping_add(1));
            kept.insert(ends, 1);
            0
        }
        Fate::Releases(out) => {
            assert_eq!(kept.remove(&ends), Some(out.len()), "some are lost or come twice");
            out.len()
        }
    }
}

/// What was let go is what had been kept of these connections, all of it.
fn settle(out: Vec<Box<[u8]>>, kept: &mut HashMap<Ends, usize>) -> usize {
    let count = out.len();
    let mut left: HashMap<Ends, usize> = HashMap::new();
    for packet in out {
        let (_, ends) = ends_of(&packet, true).expect("only TCP is kept");
        *left.entry(ends).or_default() += 1;
    }
    for (ends, packets) in left {
        assert_eq!(kept.remove(&ends), Some(packets), "some are lost or come twice");
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_nobody_would_send_are_survived() {
        let cases = (0..3000).map(packets);
        let (mut strange, mut released) = (0, 0);
        for (odd, out) in cases {
            strange += u64::from(odd);
            released += out;
        }
        assert!(strange > 100 && released > 1000, "{strange} {released}");
    }
}
