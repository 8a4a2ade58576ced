//! Who comes and goes: packets that begin or end TCP connections.
//!
//! A packet socket ([`PacketTap`]) costs each packet of the interface a copy of its description,
//! and a forwarded one a copy of its headers, before any filter is asked: a busy Redis behind one
//! answered a sixth less. A BPF program at the interface looks first and copies what it takes.

use std::os::fd::{AsFd, OwnedFd};

use crate::bpf::{
    self, Direction, EXIT, Instruction, Kind, RINGBUF_OUTPUT, SKB_LOAD_BYTES, add, and, copy,
    helper, load_word, packet_byte, packet_byte_behind, packet_half, set, shift_left, skip,
    skip_if_at_most, skip_unless, store,
};
use crate::error::{KernelError, Result};
use crate::netlink::LinkIndex;
use crate::packet_tap::{HEADER_BYTES_MAX, PacketTap};
use crate::shared::SharedMapping;
use crate::socket;

const PAGE: usize = 4096;
/// Some two thousand packets that wait to be looked at.
const RING_BYTES: usize = 64 * PAGE;
/// Before the IP packet.
const ETHERNET: i32 = 14;
const IPV4: i32 = 0x0800;
const IPV6: i32 = 0x86dd;
const TCP: i32 = 6;
/// Where the flags are in a TCP header.
const FLAGS: i32 = 13;
const FIN_OR_RST: i32 = 0x05;
const SYN_AND_ACK: i32 = 0x12;
/// `TCX_NEXT`: the packet goes its way.
const PASS: i32 = -1;
/// The last two instructions let the packet pass.
const OUT: i16 = 59;

/// Sees the packets of one interface that begin or end TCP connections: SYN with ACK, FIN, RST.
/// Fragments and IPv6 extension headers are not followed. Packets that the reader is too slow for
/// are missing.
#[derive(Debug)]
pub struct PacketDoor(Way);

#[derive(Debug)]
enum Way {
    Program(Box<Program>),
    Tap(PacketTap, KernelError),
}

impl PacketDoor {
    /// Opens the door at an interface of the calling thread's network namespace (`CAP_BPF` and
    /// `CAP_NET_ADMIN`, Linux 6.6). Where that is refused, with a packet socket (`CAP_NET_RAW`).
    pub fn open(link: LinkIndex) -> Result<Self> {
        match Program::attach(link) {
            Ok(program) => Ok(Self(Way::Program(Box::new(program)))),
            Err(error) => Ok(Self(Way::Tap(PacketTap::open_door(link)?, error))),
        }
    }

    /// Why it is the slower way, if it is.
    pub fn refused(&self) -> Option<&KernelError> {
        match &self.0 {
            Way::Program(_) => None,
            Way::Tap(_, why) => Some(why),
        }
    }

    /// The headers of the next packet, from the IP header on; waits at most `timeout_ms`.
    pub fn next(&self, timeout_ms: i32) -> Result<Option<Vec<u8>>> {
        match &self.0 {
            Way::Program(program) => program.ring.next(timeout_ms),
            Way::Tap(tap, _) => Ok(tap.next(timeout_ms)?.map(|seen| seen.packet)),
        }
    }
}

#[derive(Debug)]
struct Program {
    ring: Ring,
    /// The program is at the interface as long as these are there.
    _at: [OwnedFd; 2],
}

impl Program {
    fn attach(link: LinkIndex) -> Result<Self> {
        let ring = Ring::new()?;
        let program = Kind::Packets.load(&door(&ring.map))?;
        let at = |direction| bpf::watch_packets(&program, link, direction);
        Ok(Self { _at: [at(Direction::In)?, at(Direction::Out)?], ring })
    }
}

/// Puts the headers of such a packet into the ring.
fn door(ring: &OwnedFd) -> Vec<Instruction> {
    // From the instruction at this place to the end.
    let out = |at: i16| OUT - at - 1;
    let room = -(HEADER_BYTES_MAX as i16);
    let most = ETHERNET + HEADER_BYTES_MAX as i32;
    let mut program = vec![
        copy(6, 1),
        packet_half(12),
        skip_unless(0, IPV4, 11),
        // 3: IPv4: TCP, no later fragment, flags behind the options.
        packet_byte(ETHERNET + 9),
        skip_unless(0, TCP, out(4)),
        packet_half(ETHERNET + 6),
        and(0, 0x1fff),
        skip_unless(0, 0, out(7)),
        packet_byte(ETHERNET),
        and(0, 0x0f),
        shift_left(0, 2),
        copy(7, 0),
        packet_byte_behind(7, ETHERNET + FLAGS),
        skip(4),
        // 14: IPv6.
        skip_unless(0, IPV6, out(14)),
        packet_byte(ETHERNET + 6),
        skip_unless(0, TCP, out(16)),
        packet_byte(ETHERNET + 40 + FLAGS),
        // 18: the flags.
        copy(7, 0),
        and(0, FIN_OR_RST),
        skip_unless(0, 0, 2),
        and(7, SYN_AND_ACK),
        skip_unless(7, SYN_AND_ACK, out(22)),
        // 23: its length, or what there is room for.
        load_word(7, 6, 0),
        skip_if_at_most(7, most, 1),
        set(7, most),
        skip_if_at_most(7, ETHERNET, out(26)),
        add(7, -ETHERNET),
        set(1, 0),
    ];
    program.extend((room..0).step_by(8).map(|at| store(10, at, 1)));
    program.extend([copy(1, 6), set(2, ETHERNET), copy(3, 10), add(3, room.into()), copy(4, 7)]);
    program.extend([helper(SKB_LOAD_BYTES), skip_unless(0, 0, out(51))]);
    program.extend(bpf::map(1, ring));
    program.extend([copy(2, 10), add(2, room.into()), copy(3, 7), set(4, 0)]);
    program.extend([helper(RINGBUF_OUTPUT), set(0, PASS), EXIT]);
    debug_assert_eq!(program.len(), OUT as usize + 2, "jumps go to the end");
    program
}

/// What programs tell, read in their order (Documentation/bpf/ringbuf.rst).
#[derive(Debug)]
struct Ring {
    map: OwnedFd,
    /// How far it was read, in bytes since it was made.
    read: SharedMapping,
    /// How far it is written, and from the second page on the records, twice, so that none is
    /// broken in two.
    written: SharedMapping,
}

/// In the length of a record: it is being written, and it is to be skipped.
const BUSY: u64 = 1 << 31;
const DISCARDED: u64 = 1 << 30;
/// Length and place.
const HEAD_BYTES: usize = 8;

impl Ring {
    fn new() -> Result<Self> {
        let map = bpf::make_ring(RING_BYTES)?;
        let read = SharedMapping::new(map.as_fd(), PAGE)?;
        let written = SharedMapping::read_only(map.as_fd(), PAGE, PAGE + 2 * RING_BYTES)?;
        Ok(Self { map, read, written })
    }

    fn next(&self, timeout_ms: i32) -> Result<Option<Vec<u8>>> {
        let record = self.take();
        if record.is_some() || timeout_ms == 0 {
            return Ok(record);
        }
        socket::poll_for(self.map.as_fd(), libc::POLLIN, timeout_ms)?;
        Ok(self.take())
    }

    fn take(&self) -> Option<Vec<u8>> {
        loop {
            let at = self.read.read_u64(0);
            if at == self.written.acquire_u64(0) {
                return None;
            }
            let start = PAGE + at as usize % RING_BYTES;
            let head = self.written.acquire_u64(start);
            if head & BUSY != 0 {
                return None;
            }
            let bytes = (head & (DISCARDED - 1)) as usize;
            let mut record = vec![0; bytes];
            self.written.read(start + HEAD_BYTES, &mut record);
            self.read.release_u64(0, at + (HEAD_BYTES + bytes).next_multiple_of(8) as u64);
            if head & DISCARDED == 0 {
                return Some(record);
            }
        }
    }
}
