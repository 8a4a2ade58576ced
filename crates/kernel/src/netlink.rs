//! Interfaces, addresses, routes and neighbours by rtnetlink(7): just what moving an address needs.
//!
//! Each call is one request and its acknowledgement, some tens of microseconds.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::error::{KernelError, Result};
use crate::socket;

const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MASTER: u16 = 10;
const IFLA_TXQLEN: u16 = 13;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
/// Usable at once, without duplicate address detection (`IFA_F_NODAD`).
const IFA_F_NODAD: u32 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_METRICS: u16 = 8;
const RTAX_INITCWND: u16 = 11;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;
/// The gateway is on this link whatever the addresses say (`RTNH_F_ONLINK`).
const RTNH_F_ONLINK: u32 = 4;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;
const NTF_PROXY: u8 = 8;
const HEADER_BYTES: usize = 16;

/// An interface within one network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkIndex(pub u32);

/// A hardware address.
pub type Mac = [u8; 6];

/// An interface as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub index: LinkIndex,
    /// Its hardware address; zeros if it has none.
    pub mac: Mac,
    /// Whether it is up.
    pub up: bool,
}

/// A pair of virtual Ethernet interfaces to be made.
#[derive(Debug)]
pub struct VethPair<'a> {
    /// Name of the near end, in the handle's namespace.
    pub near: &'a str,
    /// Its hardware address.
    pub near_mac: Mac,
    /// Name of the far end.
    pub far: &'a str,
    /// Its hardware address.
    pub far_mac: Mac,
    /// The far end's network namespace.
    pub far_namespace: BorrowedFd<'a>,
}

/// A socket to rtnetlink in the network namespace in which it was opened. Closing it undoes
/// nothing.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    /// Opens one in the calling thread's network namespace; changes need `CAP_NET_ADMIN` there.
    pub fn open() -> Result<Netlink> {
        let socket = socket::create(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)?;
        Ok(Netlink { socket, sequence: 0 })
    }

    /// The interface of this name. `ENODEV` if there is none.
    pub fn link(&mut self, name: &str) -> Result<Link> {
        let mut request = Request::new(RTM_GETLINK, 0);
        request.link_header(LinkIndex(0), 0, 0);
        request.text(IFLA_IFNAME, name);
        let answer = self.ask("look up interface", request)?;
        // `struct ifinfomsg`: family, padding, type, index, flags, change.
        let mac = attribute(&answer, 16, IFLA_ADDRESS).and_then(|mac| mac.try_into().ok());
        Ok(Link {
            index: LinkIndex(number32(&answer, 4)),
            mac: mac.unwrap_or_default(),
            up: number32(&answer, 8) & libc::IFF_UP as u32 != 0,
        })
    }

    /// Makes a pair of interfaces, both down. They go together: with either end, or either
    /// namespace, both are gone.
    pub fn add_veth(&mut self, pair: &VethPair<'_>) -> Result<()> {
        let mut request = Request::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL);
        request.link_header(LinkIndex(0), 0, 0);
        request.text(IFLA_IFNAME, pair.near);
        request.attribute(IFLA_ADDRESS, &pair.near_mac);
        request.nested(IFLA_LINKINFO, |info| {
            info.text(IFLA_INFO_KIND, "veth");
            info.nested(IFLA_INFO_DATA, |data| {
                data.nested(VETH_INFO_PEER, |peer| {
                    peer.link_header(LinkIndex(0), 0, 0);
                    peer.text(IFLA_IFNAME, pair.far);
                    peer.attribute(IFLA_ADDRESS, &pair.far_mac);
                    let namespace = pair.far_namespace.as_raw_fd() as u32;
                    peer.attribute(IFLA_NET_NS_FD, &namespace.to_ne_bytes());
                });
            });
        });
        self.tell("make interface pair", request)
    }

    /// Makes a bridge, down.
    pub fn add_bridge(&mut self, name: &str) -> Result<()> {
        let mut request = Request::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL);
        request.link_header(LinkIndex(0), 0, 0);
        request.text(IFLA_IFNAME, name);
        request.nested(IFLA_LINKINFO, |info| info.text(IFLA_INFO_KIND, "bridge"));
        self.tell("make bridge", request)
    }

    /// Removes an interface (and the other end of a pair).
    pub fn delete_link(&mut self, link: LinkIndex) -> Result<()> {
        let mut request = Request::new(RTM_DELLINK, 0);
        request.link_header(link, 0, 0);
        self.tell("delete interface", request)
    }

    /// Takes an interface up or down.
    pub fn set_up(&mut self, link: LinkIndex, up: bool) -> Result<()> {
        let flag = libc::IFF_UP as u32;
        let mut request = Request::new(RTM_NEWLINK, 0);
        request.link_header(link, if up { flag } else { 0 }, flag);
        self.tell("take interface up or down", request)
    }

    /// How many packets may wait to leave through an interface.
    pub fn set_queue_length(&mut self, link: LinkIndex, packets: u32) -> Result<()> {
        let mut request = Request::new(RTM_NEWLINK, 0);
        request.link_header(link, 0, 0);
        request.attribute(IFLA_TXQLEN, &packets.to_ne_bytes());
        self.tell("set the length of an interface's queue", request)
    }

    /// Makes an interface a port of a bridge, or of none.
    pub fn set_master(&mut self, link: LinkIndex, bridge: Option<LinkIndex>) -> Result<()> {
        let mut request = Request::new(RTM_NEWLINK, 0);
        request.link_header(link, 0, 0);
        let master = bridge.map_or(0, |bridge| bridge.0);
        request.attribute(IFLA_MASTER, &master.to_ne_bytes());
        self.tell("connect interface to bridge", request)
    }

    /// Adds an address; that it is there already is no error. IPv6 addresses are usable at once.
    pub fn add_address(&mut self, link: LinkIndex, address: IpAddr, prefix: u8) -> Result<()> {
        let mut request = Request::new(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE);
        request.address(link, address, prefix);
        request.attribute(IFA_FLAGS, &IFA_F_NODAD.to_ne_bytes());
        self.tell("add address", request)
    }

    /// Removes an address.
    pub fn delete_address(&mut self, link: LinkIndex, address: IpAddr, prefix: u8) -> Result<()> {
        let mut request = Request::new(RTM_DELADDR, 0);
        request.address(link, address, prefix);
        self.tell("remove address", request)
    }

    /// Adds or replaces a route. Without `to` it is the default route; `gateway` is taken to be on
    /// the link.
    pub fn add_route(
        &mut self,
        to: Option<(IpAddr, u8)>,
        gateway: Option<IpAddr>,
        link: LinkIndex,
    ) -> Result<()> {
        let mut request = Request::new(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE);
        request.route(to, gateway, link);
        self.tell("add route", request)
    }

    /// As [`Netlink::add_route`] without a gateway, and new connections may send `segments` there
    /// before the first acknowledgement (`initcwnd` in ip-route(8)).
    pub fn add_route_with_flight(
        &mut self,
        to: (IpAddr, u8),
        link: LinkIndex,
        segments: u32,
    ) -> Result<()> {
        let mut request = Request::new(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE);
        request.route(Some(to), None, link);
        request.nested(RTA_METRICS, |metrics| {
            metrics.attribute(RTAX_INITCWND, &segments.to_ne_bytes());
        });
        self.tell("set the first flight of a route", request)
    }

    /// Removes a route to `to`.
    pub fn delete_route(&mut self, to: (IpAddr, u8), link: LinkIndex) -> Result<()> {
        let mut request = Request::new(RTM_DELROUTE, 0);
        request.route(Some(to), None, link);
        self.tell("remove route", request)
    }

    /// States once and for all which hardware address has `address`.
    pub fn add_neighbour(&mut self, link: LinkIndex, address: IpAddr, mac: Mac) -> Result<()> {
        let mut request = Request::new(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE);
        request.neighbour(link, address, NUD_PERMANENT, 0);
        request.attribute(NDA_LLADDR, &mac);
        self.tell("add neighbour", request)
    }

    /// Answers others' questions for `address` on `link` with the link's own hardware address
    /// (proxy ARP, proxy NDP), or no longer.
    pub fn set_proxy(&mut self, link: LinkIndex, address: IpAddr, answer: bool) -> Result<()> {
        let (kind, flags) = if answer { (RTM_NEWNEIGH, NLM_F_CREATE) } else { (RTM_DELNEIGH, 0) };
        let mut request = Request::new(kind, flags);
        request.neighbour(link, address, 0, NTF_PROXY);
        self.tell("answer for address", request)
    }

    fn tell(&mut self, verb: &'static str, request: Request) -> Result<()> {
        self.ask(verb, request).map(drop)
    }

    /// Sends a request; the body of the message before the acknowledgement, if any.
    fn ask(&mut self, verb: &'static str, request: Request) -> Result<Vec<u8>> {
        self.sequence = self.sequence.wrapping_add(1);
        socket::send(self.socket.as_fd(), &request.finish(self.sequence), 0)?;
        let mut answer = Vec::new();
        let mut buffer = vec![0u8; 16 << 10];
        loop {
            let length = socket::receive(self.socket.as_fd(), &mut buffer, 0)?.unwrap_or(0);
            let mut rest = &buffer[..length];
            while let Some((kind, sequence, body, after)) = split(rest) {
                rest = after;
                if sequence != self.sequence {
                    continue;
                }
                match (kind, number32(body, 0) as i32) {
                    (NLMSG_ERROR, 0) => return Ok(answer),
                    (NLMSG_ERROR, errno) => return Err(KernelError::from_errno(verb, -errno)),
                    _ => answer = body.to_vec(),
                }
            }
        }
    }
}

fn split(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let length = number32(bytes.get(..HEADER_BYTES)?, 0) as usize;
    let body = bytes.get(HEADER_BYTES..length)?;
    let after = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((number16(bytes, 4), number32(bytes, 8), body, after))
}

fn number16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |b| u16::from_ne_bytes([b[0], b[1]]))
}

fn number32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

/// An attribute of a message whose fixed part has `skip` bytes.
fn attribute(body: &[u8], skip: usize, wanted: u16) -> Option<&[u8]> {
    let mut rest = body.get(skip..)?;
    while rest.len() >= 4 {
        let length = usize::from(number16(rest, 0));
        let value = rest.get(4..length)?;
        if number16(rest, 2) == wanted {
            return Some(value);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
    None
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

/// A request under construction.
struct Request(Vec<u8>);

impl Request {
    fn new(kind: u16, flags: u16) -> Request {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
        bytes.extend([0; 8]);
        Request(bytes)
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[0..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }

    /// `struct ifinfomsg`.
    fn link_header(&mut self, link: LinkIndex, flags: u32, change: u32) {
        self.0.extend([0; 4]);
        for number in [link.0, flags, change] {
            self.0.extend(number.to_ne_bytes());
        }
    }

    /// `struct ifaddrmsg` and both addresses.
    fn address(&mut self, link: LinkIndex, address: IpAddr, prefix: u8) {
        self.0.extend([family(address), prefix, 0, RT_SCOPE_UNIVERSE]);
        self.0.extend(link.0.to_ne_bytes());
        self.attribute(IFA_LOCAL, &octets(address));
        self.attribute(IFA_ADDRESS, &octets(address));
    }

    /// `struct rtmsg` and its attributes.
    fn route(&mut self, to: Option<(IpAddr, u8)>, gateway: Option<IpAddr>, link: LinkIndex) {
        let some = to.map(|(address, _)| address).or(gateway);
        let prefix = to.map_or(0, |(_, prefix)| prefix);
        let scope = if gateway.is_some() { RT_SCOPE_UNIVERSE } else { RT_SCOPE_LINK };
        self.0.extend([some.map_or(libc::AF_INET as u8, family), prefix, 0, 0]);
        self.0.extend([RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST]);
        let flags = if gateway.is_some() { RTNH_F_ONLINK } else { 0 };
        self.0.extend(flags.to_ne_bytes());
        if let Some((address, _)) = to {
            self.attribute(RTA_DST, &octets(address));
        }
        if let Some(gateway) = gateway {
            self.attribute(RTA_GATEWAY, &octets(gateway));
        }
        self.attribute(RTA_OIF, &link.0.to_ne_bytes());
    }

    /// `struct ndmsg` and the address.
    fn neighbour(&mut self, link: LinkIndex, address: IpAddr, state: u16, flags: u8) {
        self.0.extend([family(address), 0, 0, 0]);
        self.0.extend(link.0.to_ne_bytes());
        self.0.extend(state.to_ne_bytes());
        self.0.extend([flags, 0]);
        self.attribute(NDA_DST, &octets(address));
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.nested(kind, |inner| inner.0.extend_from_slice(value));
    }

    fn text(&mut self, kind: u16, text: &str) {
        self.nested(kind, |inner| {
            inner.0.extend_from_slice(text.as_bytes());
            inner.0.push(0);
        });
    }

    fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Request)) {
        let start = self.0.len();
        self.0.extend([0; 2]);
        self.0.extend(kind.to_ne_bytes());
        fill(self);
        let length = (self.0.len() - start) as u16;
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}
