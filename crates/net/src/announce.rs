//! Telling the neighbours where an address is now: gratuitous ARP, unsolicited neighbour
//! advertisement. Frames are made here and sent directly; `arping` takes a second.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};

use hotspare_kernel::netlink::{LinkIndex, Mac};
use hotspare_kernel::{Result, socket};

pub(crate) const BROADCAST: Mac = [0xff; 6];
/// ff02::1 as Ethernet sees it (RFC 2464).
const ALL_NODES_MAC: Mac = [0x33, 0x33, 0, 0, 0, 1];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
pub(crate) const ETHERTYPE_ARP: u16 = 0x0806;
pub(crate) const ETHERTYPE_IPV6: u16 = 0x86dd;
pub(crate) const NEXT_HEADER_ICMPV6: u8 = 58;
pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Override what the neighbours believe (RFC 4861, 4.4).
const FLAG_OVERRIDE: u8 = 0x20;

/// A frame that says to everybody on the link that `address` is at `mac`.
#[must_use]
pub fn frame(address: IpAddr, mac: Mac) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => gratuitous_arp(address, mac),
        IpAddr::V6(address) => advertisement(address, mac),
    }
}

/// In the form of a request: everybody who knows the address learns, nobody answers. (The reply
/// form is ignored by some unless target and sender hardware address are equal.)
fn gratuitous_arp(address: Ipv4Addr, mac: Mac) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, ETHERTYPE_ARP);
    // Ethernet, IPv4, lengths 6 and 4, request.
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(mac);
    frame.extend(address.octets());
    frame.extend([0; 6]);
    frame.extend(address.octets());
    frame.resize(60, 0);
    frame
}

fn advertisement(address: Ipv6Addr, mac: Mac) -> Vec<u8> {
    let mut message = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, FLAG_OVERRIDE, 0, 0, 0];
    message.extend(address.octets());
    // Option: target's link-layer address, one unit of eight bytes.
    message.extend([2, 1]);
    message.extend(mac);
    let mut frame = ethernet(ALL_NODES_MAC, mac, ETHERTYPE_IPV6);
    frame.extend(icmpv6(address, ALL_NODES, message));
    frame
}

/// The packet of a neighbour's message, which gets its checksum.
pub(crate) fn icmpv6(from: Ipv6Addr, to: Ipv6Addr, mut message: Vec<u8>) -> Vec<u8> {
    let checksum = icmpv6_checksum(from, to, &message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((message.len() as u16).to_be_bytes());
    // Hop limit 255, or it is not believed.
    packet.extend([NEXT_HEADER_ICMPV6, 255]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(message);
    packet
}

pub(crate) fn ethernet(to: Mac, from: Mac, ethertype: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(96);
    frame.extend(to);
    frame.extend(from);
    frame.extend(ethertype.to_be_bytes());
    frame
}

fn icmpv6_checksum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let mut bytes = [from.octets(), to.octets()].concat();
    bytes.extend((message.len() as u32).to_be_bytes());
    bytes.extend([0, 0, 0, NEXT_HEADER_ICMPV6]);
    bytes.extend(message);
    let sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded + (folded >> 16)) as u16)
}

/// Sends frames on one interface, from the network namespace in which it was opened.
#[derive(Debug)]
pub struct FrameSender {
    socket: OwnedFd,
    address: Vec<u8>,
}

impl FrameSender {
    /// Opens a packet socket that receives nothing (`CAP_NET_RAW`).
    pub fn open(link: LinkIndex) -> Result<FrameSender> {
        let socket = socket::create(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
        // `struct sockaddr_ll`: family, protocol, index, hardware type, packet type, address.
        let mut address = (libc::AF_PACKET as u16).to_ne_bytes().to_vec();
        address.extend([0; 2]);
        address.extend(link.0.to_ne_bytes());
        address.extend([0, 0, 0, 6]);
        address.extend([0; 8]);
        Ok(FrameSender { socket, address })
    }

    /// Sends one Ethernet frame.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        socket::send_to(self.socket.as_fd(), frame, &self.address).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 9];

    #[test]
    fn an_ipv4_address_is_announced_as_a_request_for_itself() {
        let frame = frame("10.77.0.50".parse().unwrap(), MAC);
        assert_eq!(frame.len(), 60);
        assert_eq!(frame[0..6], BROADCAST);
        assert_eq!(frame[20..22], [0, 1], "request");
        assert_eq!(frame[28..32], frame[38..42], "sender and target are the address");
    }

    #[test]
    fn an_ipv6_advertisement_has_a_checksum_that_sums_to_nothing() {
        let address: Ipv6Addr = "fd77::50".parse().unwrap();
        let frame = advertisement(address, MAC);
        assert_eq!(frame[21], 255, "hop limit");
        assert_eq!(icmpv6_checksum(address, ALL_NODES, &frame[54..]), 0);
    }
}
