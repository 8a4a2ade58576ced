//! Asks a link whether somebody there has an address: by an ARP request (RFC 826), or by the
//! neighbour solicitation with which a host makes sure before it takes an address (RFC 4862,
//! 5.4.2). What this host has been told before does not count, only who answers now.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotspare_kernel::netlink::{Link, Mac};
use hotspare_kernel::{Result, socket};

use crate::announce::{
    BROADCAST, ETHERTYPE_ARP, ETHERTYPE_IPV6, NEIGHBOUR_ADVERTISEMENT, ethernet, icmpv6,
};

const NEIGHBOUR_SOLICITATION: u8 = 135;
/// `ar_op` of an answer.
const ARP_REPLY: [u8; 2] = [0, 2];
/// Frames that matter are shorter.
const FRAME_BYTES_MAX: usize = 256;
/// The question is repeated: a frame may get lost.
const TIMES: u32 = 2;

/// Who answers for `address` on a link within `wait`, by hardware address; `own` is an IPv4
/// address that this host has there, if it has any. Needs `CAP_NET_RAW`.
pub fn who_has(
    link: Link,
    own: Option<Ipv4Addr>,
    address: IpAddr,
    wait: Duration,
) -> Result<Option<Mac>> {
    let (ethertype, question) = match address {
        IpAddr::V4(address) => (ETHERTYPE_ARP, arp_request(link.mac, own, address)),
        IpAddr::V6(address) => (ETHERTYPE_IPV6, solicitation(link.mac, address)),
    };
    // With protocol 0 nothing comes before it is bound.
    let asking = socket::create(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
    // `struct sockaddr_ll`: family, protocol, index, then nothing that bind(2) reads.
    let mut place = (libc::AF_PACKET as u16).to_ne_bytes().to_vec();
    place.extend(ethertype.to_be_bytes());
    place.extend(link.index.0.to_ne_bytes());
    place.extend([0; 12]);
    socket::bind(asking.as_fd(), &place)?;
    for _ in 0..TIMES {
        socket::send(asking.as_fd(), &question, 0)?;
        let until = Instant::now() + wait / TIMES;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            // Rounded up: with 0 it would not wait.
            let left_ms = left.as_millis() as i32 + 1;
            socket::poll_for(asking.as_fd(), libc::POLLIN, left_ms)?;
            let flags = libc::MSG_DONTWAIT;
            let come = socket::receive_from(asking.as_fd(), FRAME_BYTES_MAX, flags)?;
            let answer = come.and_then(|frame| answer(&frame.bytes, address));
            if let Some(mac) = answer.filter(|mac| *mac != link.mac) {
                return Ok(Some(mac));
            }
        }
    }
    Ok(None)
}

/// From one's own address where there is one: a host that answers for another (proxy ARP) does not
/// answer those who have none.
fn arp_request(mac: Mac, own: Option<Ipv4Addr>, address: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, ETHERTYPE_ARP);
    // Ethernet, IPv4, lengths 6 and 4, request.
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(mac);
    frame.extend(own.unwrap_or(Ipv4Addr::UNSPECIFIED).octets());
    frame.extend([0; 6]);
    frame.extend(address.octets());
    frame.resize(60, 0);
    frame
}

fn solicitation(mac: Mac, address: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = address.octets();
    // ff02::1:ff00:0/104 (RFC 4291, 2.7.1), and as Ethernet sees it.
    let group = Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(a),
        256 * u16::from(b) + u16::from(c),
    );
    let mut message = vec![NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
    message.extend(address.octets());
    let mut frame = ethernet([0x33, 0x33, 0xff, a, b, c], mac, ETHERTYPE_IPV6);
    // Whoever has it tells all: they do not know us.
    frame.extend(icmpv6(Ipv6Addr::UNSPECIFIED, group, message));
    frame
}

/// Who says in this frame that it has the address.
fn answer(frame: &[u8], address: IpAddr) -> Option<Mac> {
    let at = |from: usize, to: usize| frame.get(from..to);
    match address {
        IpAddr::V4(address) => {
            let answers = at(12, 14)? == ETHERTYPE_ARP.to_be_bytes() && at(20, 22)? == ARP_REPLY;
            (answers && at(28, 32)? == address.octets()).then(|| at(22, 28)?.try_into().ok())?
        }
        IpAddr::V6(address) => {
            let answers = at(12, 14)? == ETHERTYPE_IPV6.to_be_bytes()
                && at(20, 21)? == [crate::announce::NEXT_HEADER_ICMPV6]
                && at(54, 55)? == [NEIGHBOUR_ADVERTISEMENT];
            (answers && at(62, 78)? == address.octets()).then(|| at(6, 12)?.try_into().ok())?
        }
    }
}
