//! TCP segments as bytes: built to be sent through a raw socket, read from a packet tap.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use crate::error::Result;
use crate::socket;

/// Flag bits of the TCP header (RFC 9293).
pub mod flag {
    /// No more bytes follow.
    pub const FIN: u8 = 1;
    /// Opens a connection.
    pub const SYN: u8 = 2;
    /// Ends a connection at once.
    pub const RST: u8 = 4;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 16;
}

/// A TCP segment without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// Sequence number of the first byte.
    pub sequence: u32,
    /// Next byte the sender expects, where [`flag::ACK`] is set.
    pub acknowledgement: u32,
    /// Set of [`flag`] bits.
    pub flags: u8,
    /// Window field, unscaled.
    pub window: u16,
    /// Bytes of payload.
    pub payload_bytes: u32,
}

impl Segment {
    /// Sequence numbers it takes up: its payload, SYN and FIN.
    pub fn span(&self) -> u32 {
        let counts = |bit| u32::from(self.flags & bit != 0);
        self.payload_bytes.wrapping_add(counts(flag::SYN)).wrapping_add(counts(flag::FIN))
    }

    /// The IP packet, without payload. `None` where the families of the addresses differ.
    pub fn to_packet(&self) -> Option<Vec<u8>> {
        let mut header = Vec::with_capacity(20);
        header.extend(self.from.port().to_be_bytes());
        header.extend(self.to.port().to_be_bytes());
        header.extend(self.sequence.to_be_bytes());
        header.extend(self.acknowledgement.to_be_bytes());
        header.extend([5 << 4, self.flags]);
        header.extend(self.window.to_be_bytes());
        header.extend([0; 4]);
        packet(self.from, self.to, TCP, header, 16)
    }

    /// Reads an IP packet; `None` for what is not a whole TCP header. Fragments and IPv6
    /// extension headers are not followed. `packet` may end before the payload does.
    pub fn from_packet(packet: &[u8]) -> Option<Self> {
        let (from, to, header, length) = match packet.first()? >> 4 {
            4 => {
                let offset = usize::from(packet[0] & 15) * 4;
                let total = usize::from(number16(packet, 2)?);
                let fragment = number16(packet, 6)? & 0x1fff;
                if *packet.get(9)? != TCP || fragment != 0 {
                    return None;
                }
                let from: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
                let to: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
                let length = total.checked_sub(offset)?;
                (IpAddr::from(from), IpAddr::from(to), packet.get(offset..)?, length)
            }
            6 => {
                let length = usize::from(number16(packet, 4)?);
                if *packet.get(6)? != TCP {
                    return None;
                }
                let from: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
                let to: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
                (IpAddr::from(from), IpAddr::from(to), packet.get(40..)?, length)
            }
            _ => return None,
        };
        let header_bytes = usize::from(header.get(12)? >> 4) * 4;
        Some(Self {
            from: SocketAddr::new(from, number16(header, 0)?),
            to: SocketAddr::new(to, number16(header, 2)?),
            sequence: number32(header, 4)?,
            acknowledgement: number32(header, 8)?,
            flags: *header.get(13)?,
            window: number16(header, 14)?,
            payload_bytes: length.checked_sub(header_bytes)? as u32,
        })
    }
}

/// Who has sent an IP packet, as it says.
pub fn source(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(packet.get(12..16)?).ok()?)),
        6 => Some(IpAddr::from(<[u8; 16]>::try_from(packet.get(8..24)?).ok()?)),
        _ => None,
    }
}

/// IP's numbers for TCP and UDP.
const TCP: u8 = 6;
const UDP: u8 = 17;

/// A UDP datagram with its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// The bytes.
    pub payload: &'a [u8],
}

impl Datagram<'_> {
    /// The IP packet. `None` where the families of the addresses differ or it is too long.
    pub fn to_packet(&self) -> Option<Vec<u8>> {
        let mut body = Vec::with_capacity(8 + self.payload.len());
        body.extend(self.from.port().to_be_bytes());
        body.extend(self.to.port().to_be_bytes());
        body.extend(u16::try_from(8 + self.payload.len()).ok()?.to_be_bytes());
        body.extend([0; 2]);
        body.extend(self.payload);
        packet(self.from, self.to, UDP, body, 6)
    }
}

/// An IP packet around `body`, whose checksum belongs at `sum_at`.
fn packet(
    from: SocketAddr,
    to: SocketAddr,
    protocol: u8,
    mut body: Vec<u8>,
    sum_at: usize,
) -> Option<Vec<u8>> {
    let length = u16::try_from(body.len()).ok()?;
    let (mut packet, pseudo) = match (unmapped(from.ip()), unmapped(to.ip())) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut packet = vec![0x45, 0];
            packet.extend(length.checked_add(20)?.to_be_bytes());
            packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let sum = checksum(&[&packet]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            (packet, [&from.octets()[..], &to.octets()].concat())
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut packet = vec![0x60, 0, 0, 0];
            packet.extend(length.to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            (packet, [&from.octets()[..], &to.octets()].concat())
        }
        _ => return None,
    };
    let [high, low] = length.to_be_bytes();
    let sum = match checksum(&[&pseudo, &[0, protocol, high, low], &body]) {
        // Zero would say that there is no checksum (RFC 768).
        0 if protocol == UDP => 0xffff,
        sum => sum,
    };
    body.get_mut(sum_at..sum_at + 2)?.copy_from_slice(&sum.to_be_bytes());
    packet.extend(body);
    Some(packet)
}

fn number16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn number32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// An IPv4 address that is mapped into IPv6 travels as IPv4.
pub fn unmapped(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// The Internet checksum (RFC 1071) over parts of even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 = words.map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

/// Sends whole IP packets from the network namespace it was opened in (`CAP_NET_RAW`). A packet
/// to an address of that namespace arrives there, whoever it claims to come from.
#[derive(Debug)]
pub struct SegmentSender {
    v4: OwnedFd,
    v6: Option<OwnedFd>,
}

impl SegmentSender {
    /// Opens raw sockets in the calling thread's network namespace.
    pub fn open() -> Result<Self> {
        let v4 = socket::create(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW)?;
        let v6 = socket::create(libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_RAW).ok();
        Ok(Self { v4, v6 })
    }

    /// Sends the segment; `false` where its addresses make no packet or IPv6 is off here.
    pub fn send(&self, segment: &Segment) -> Result<bool> {
        self.send_packet(segment.to_packet(), segment.to)
    }

    /// Sends the datagram; `false` where its
    /// addresses make no packet or IPv6 is off here.
    pub fn send_datagram(&self, datagram: &Datagram<'_>) -> Result<bool> {
        self.send_packet(datagram.to_packet(), datagram.to)
    }

    fn send_packet(&self, packet: Option<Vec<u8>>, to: SocketAddr) -> Result<bool> {
        let Some(packet) = packet else { return Ok(false) };
        let mut address = Vec::with_capacity(28);
        let fd = match unmapped(to.ip()) {
            IpAddr::V4(v4) => {
                address.extend((libc::AF_INET as u16).to_ne_bytes());
                address.extend([0; 2]);
                address.extend(v4.octets());
                address.extend([0; 8]);
                &self.v4
            }
            IpAddr::V6(v6) => {
                let Some(fd) = &self.v6 else { return Ok(false) };
                let scope = match to {
                    SocketAddr::V6(to) => to.scope_id(),
                    SocketAddr::V4(_) => 0,
                };
                address.extend((libc::AF_INET6 as u16).to_ne_bytes());
                address.extend([0; 6]);
                address.extend(v6.octets());
                address.extend(scope.to_ne_bytes());
                fd
            }
        };
        socket::send_to(fd.as_fd(), &packet, &address)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(from: &str, to: &str) -> Segment {
        Segment {
            from: from.parse().expect("an address"),
            to: to.parse().expect("an address"),
            sequence: 0xdead_beef,
            acknowledgement: 77,
            flags: flag::ACK | flag::RST,
            window: 500,
            payload_bytes: 0,
        }
    }

    #[test]
    fn a_segment_survives_its_packet() {
        for (from, to) in [("10.0.0.1:80", "10.0.0.2:4000"), ("[fd00::1]:80", "[fd00::2]:4000")] {
            let segment = sample(from, to);
            let packet = segment.to_packet().expect("one family");
            assert_eq!(Segment::from_packet(&packet), Some(segment));
            for length in 0..packet.len() {
                let _ = Segment::from_packet(&packet[..length]);
            }
        }
    }

    #[test]
    fn mapped_addresses_travel_as_ipv4() {
        let packet = sample("[::ffff:10.0.0.1]:80", "10.0.0.2:4000").to_packet();
        assert_eq!(packet.expect("one family")[0], 0x45);
    }
}
