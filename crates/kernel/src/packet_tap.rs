//! A look at all packets of a network namespace (packet(7)).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::Result;
use crate::netlink::LinkIndex;
use crate::socket;

/// Bytes kept of each packet: the headers.
pub const HEADER_BYTES_MAX: usize = 128;
/// `ETH_P_ALL`.
const ALL_PROTOCOLS: u16 = 3;
/// `PACKET_OUTGOING`.
const OUTGOING: u8 = 4;
/// `ARPHRD_LOOPBACK`.
const LOOPBACK: u16 = 772;
/// `SOL_PACKET`, `PACKET_STATISTICS`.
const SOL_PACKET: i32 = 263;
const STATISTICS: i32 = 6;

/// Which packets of an interface begin or end TCP connections, as a classic BPF program over IP
/// packets: SYN with ACK, FIN, RST. Fragments and IPv6 extension headers are not followed.
const DOOR: [(u16, u8, u8, u32); 19] = [
    // 0: the version.
    (0x30, 0, 0, 0),
    (0x74, 0, 0, 4),
    (0x15, 0, 7, 4),
    // 3: IPv4: TCP, no later fragment, flags behind the options.
    (0x30, 0, 0, 9),
    (0x15, 0, 12, 6),
    (0x28, 0, 0, 6),
    (0x45, 10, 0, 0x1fff),
    (0xb1, 0, 0, 0),
    (0x50, 0, 0, 13),
    (0x05, 0, 0, 4),
    // 10: IPv6.
    (0x15, 0, 6, 6),
    (0x30, 0, 0, 6),
    (0x15, 0, 4, 6),
    (0x30, 0, 0, 53),
    // 14: FIN or RST; SYN and ACK.
    (0x45, 3, 0, 0x05),
    (0x54, 0, 0, 0x12),
    (0x15, 1, 0, 0x12),
    // 17: drop, 18: take the headers.
    (0x06, 0, 0, 0),
    (0x06, 0, 0, HEADER_BYTES_MAX as u32),
];

/// A packet as the tap saw it.
#[derive(Debug)]
pub struct Seen {
    /// The first bytes of the IP packet.
    pub packet: Vec<u8>,
    /// It leaves this namespace.
    pub outgoing: bool,
    /// It goes over the loopback interface.
    pub loopback: bool,
}

/// Sees every packet that enters or leaves the network namespace it was opened in. Packets that
/// the reader is too slow for are missing, and counted.
#[derive(Debug)]
pub struct PacketTap(OwnedFd);

impl PacketTap {
    /// Opens a tap in the calling thread's network namespace (`CAP_NET_RAW`), with room for
    /// packets of together `buffer_bytes` that wait to be looked at.
    pub fn open(buffer_bytes: i32) -> Result<Self> {
        let protocol = i32::from(ALL_PROTOCOLS.to_be());
        let fd = socket::create(libc::AF_PACKET, libc::SOCK_DGRAM, protocol)?;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
        socket::set_option_i32(fd.as_fd(), level, name, buffer_bytes)?;
        // `ret #128`: take every packet, keep its headers.
        let mut keep_headers = (libc::BPF_RET as u16).to_ne_bytes().to_vec();
        keep_headers.extend([0, 0]);
        keep_headers.extend((HEADER_BYTES_MAX as u32).to_ne_bytes());
        socket::attach_filter(fd.as_fd(), &keep_headers)?;
        Ok(Self(fd))
    }

    /// Sees only packets that begin or end TCP connections on one interface of the calling
    /// thread's network namespace (`CAP_NET_RAW`).
    pub fn open_door(link: LinkIndex) -> Result<Self> {
        // With protocol 0 nothing comes before the filter is there.
        let fd = socket::create(libc::AF_PACKET, libc::SOCK_DGRAM, 0)?;
        let code = |(code, yes, no, k): &(u16, u8, u8, u32)| {
            let mut bytes = code.to_ne_bytes().to_vec();
            bytes.extend([*yes, *no]);
            bytes.extend(k.to_ne_bytes());
            bytes
        };
        let program: Vec<u8> = DOOR.iter().flat_map(code).collect();
        socket::attach_filter(fd.as_fd(), &program)?;
        // `struct sockaddr_ll`: family, protocol, index, then nothing that bind(2) reads.
        let mut address = (libc::AF_PACKET as u16).to_ne_bytes().to_vec();
        address.extend(ALL_PROTOCOLS.to_be_bytes());
        address.extend(link.0.to_ne_bytes());
        address.extend([0; 12]);
        socket::bind(fd.as_fd(), &address)?;
        Ok(Self(fd))
    }

    /// The next packet; waits at most `timeout_ms`.
    pub fn next(&self, timeout_ms: i32) -> Result<Option<Seen>> {
        let message = match self.take()? {
            Some(message) => Some(message),
            None if timeout_ms == 0 => None,
            None => {
                socket::poll_for(self.0.as_fd(), libc::POLLIN, timeout_ms)?;
                self.take()?
            }
        };
        // `struct sockaddr_ll`: family, protocol, index, hardware type, packet type.
        Ok(message.map(|message| {
            let from = &message.from;
            let hardware = from.get(8..10).map_or(0, |b| u16::from_ne_bytes([b[0], b[1]]));
            Seen {
                outgoing: from.get(10) == Some(&OUTGOING),
                loopback: hardware == LOOPBACK,
                packet: message.bytes,
            }
        }))
    }

    fn take(&self) -> Result<Option<socket::Message>> {
        socket::receive_from(self.0.as_fd(), HEADER_BYTES_MAX, libc::MSG_DONTWAIT)
    }

    /// Packets missed since the last call.
    pub fn missed(&self) -> Result<u32> {
        let mut statistics = [0u8; 8];
        socket::get_option(self.0.as_fd(), SOL_PACKET, STATISTICS, &mut statistics)?;
        Ok(u32::from_ne_bytes([statistics[4], statistics[5], statistics[6], statistics[7]]))
    }
}

impl AsFd for PacketTap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
