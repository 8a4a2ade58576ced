//! Telling the neighbours where an address is now: gratuitous ARP, unsolicited neighbour
//! advertisement. Frames are made here and sent directly; `arping` takes a second.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotspare_kernel::netlink::{LinkIndex, Mac};
use hotspare_kernel::{Result, socket};

/// When an announcement is repeated, counted from the one before: a network may lose frames, and a
/// neighbour that has heard none goes on sending to a dead host for up to a minute (RFC 5227, 2.3,
/// repeats for the same reason).
const AGAIN: [Duration; 5] = [
    Duration::from_millis(20),
    Duration::from_millis(80),
    Duration::from_millis(400),
    Duration::from_millis(1000),
    Duration::from_millis(2000),
];
/// A thread that wakes so late may have stood still with its agent, and another host may have the
/// address since: that one repetition is left out. Until the next the agent has heard of it.
const LATE_MAX: Duration = Duration::from_millis(50);

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

/// Announces an address, and again some times as long as that is true.
#[derive(Debug)]
pub(crate) struct Announcer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    sender: FrameSender,
    frame: Vec<u8>,
    /// Announcements so far, and ends of them.
    round: Mutex<u64>,
}

impl Shared {
    fn round(&self) -> MutexGuard<'_, u64> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Announcer {
    pub(crate) fn new(sender: FrameSender, frame: Vec<u8>) -> Announcer {
        Announcer(Arc::new(Shared { sender, frame, round: Mutex::default() }))
    }

    /// Sends one frame, and has it repeated. Fails if the first cannot be sent.
    pub(crate) fn announce(&self) -> Result<()> {
        let mut round = self.0.round();
        *round += 1;
        self.0.sender.send(&self.0.frame)?;
        let own = *round;
        // Whoever drops the announcer ends it: no thread keeps a namespace.
        let shared = Arc::downgrade(&self.0);
        let repeat = move || {
            for gap in AGAIN {
                let began = Instant::now();
                std::thread::sleep(gap);
                let Some(shared) = shared.upgrade() else { return };
                let round = shared.round();
                if *round != own {
                    return;
                }
                if began.elapsed() > gap + LATE_MAX {
                    continue;
                }
                // As good as lost, and there are others.
                let _ = shared.sender.send(&shared.frame);
            }
        };
        // Without a thread for it the first has to do.
        let _ = std::thread::Builder::new().name("announcer".into()).spawn(repeat);
        Ok(())
    }

    /// The address is here no more: nothing is sent from here on.
    pub(crate) fn hush(&self) {
        *self.0.round() += 1;
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use hotspare_kernel::netlink::Netlink;

    #[test]
    fn an_announcement_is_repeated_until_it_is_no_more_true() {
        // On a thread of its own, in a network of its own.
        unshare(CloneFlags::CLONE_NEWNET).expect("tests of networks need root");
        let mut netlink = Netlink::open().unwrap();
        let link = netlink.link("lo").unwrap().index;
        netlink.set_up(link, true).unwrap();
        let hearing = socket::create(libc::AF_PACKET, libc::SOCK_RAW, 0).unwrap();
        let mut place = (libc::AF_PACKET as u16).to_ne_bytes().to_vec();
        place.extend(ETHERTYPE_ARP.to_be_bytes());
        place.extend(link.0.to_ne_bytes());
        place.extend([0; 12]);
        socket::bind(hearing.as_fd(), &place).unwrap();
        let hears = |within_ms| {
            let _ = socket::poll_for(hearing.as_fd(), libc::POLLIN, within_ms);
            socket::receive_from(hearing.as_fd(), 256, libc::MSG_DONTWAIT).unwrap().is_some()
        };

        let sender = FrameSender::open(link).unwrap();
        let announcer = Announcer::new(sender, gratuitous_arp(Ipv4Addr::LOCALHOST, MAC));
        announcer.announce().unwrap();
        // A frame is seen when it leaves and when it comes.
        for _ in 0..4 {
            assert!(hears(60_000), "the second announcement never came");
        }
        announcer.hush();
        while hears(0) {}
        assert!(!hears(1_500), "said though it is not true");
    }

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
