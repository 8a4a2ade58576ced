//! The service address: where it lives, how it moves.
//!
//! The guest's network namespace has an interface `eth0` with the service address, on the primary
//! and, as an exact copy, on every spare. Its other end is on the host. Only the primary's other
//! end is connected to the world:
//!
//! ```text
//!   guest namespace │ host                       bridge: the host's end is a port of the bridge
//!   eth0 ── veth ───┼── hsXXXXXX ──▶ br0         that has the host's own interface as a port
//!   10.0.0.50/24    │            └─▶ route,      routed: the host has a route to the address and
//!                   │                proxy ARP   answers for it on its own interface
//! ```
//!
//! Where output is held ([`crate::gate`]) both ends are TUN interfaces with the agent between them,
//! and the host routes.
//!
//! So on a spare everything is built and up, sockets can be bound and rebuilt on the address, and
//! yet no packet enters or leaves. Going live is connecting the end and telling the neighbours.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotspare_kernel::KernelError;
use hotspare_kernel::netlink::{Link, LinkIndex, Mac, Netlink, VethPair};
use hotspare_kernel::tun::Tun;
use nix::sched::{CloneFlags, setns};

use crate::announce::{Announcer, FrameSender, frame};
use crate::gate::Gate;
use crate::relay::Relay;

/// The guest's interface.
pub const GUEST_LINK: &str = "eth0";
/// Gateway of routed guests: never on the wire, the host's end is behind it.
const ROUTED_GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const ROUTED_GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
/// Packets that may wait at an interface for the agent: as many as a pause brings.
const GATED_QUEUE: u32 = 5000;
/// Segments that a connection may send at once after a takeover: as many as an ordinary one has
/// under way at most (4 MiB, the largest send buffer by itself).
const FLIGHT_MAX: u32 = 3000;

/// Why the service address cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The text is not `ADDRESS/PREFIX`.
    #[error("{0:?} is not a service address: write ADDRESS/PREFIX, as in 10.0.0.50/24")]
    Address(String),
    /// The bridge or interface is not there, or is down.
    #[error(
        "the host's interface {name} {problem}; bring it up, or name a bridge with --service-bridge"
    )]
    HostLink {
        /// Which.
        name: String,
        /// `does not exist` or `is down`.
        problem: &'static str,
    },
    /// The kernel refuses a step.
    #[error("{doing}: {error}")]
    Kernel {
        /// Which.
        doing: &'static str,
        /// What it says.
        error: KernelError,
    },
    /// A setting cannot be made.
    #[error("set {path}: {error}")]
    Setting {
        /// Which.
        path: String,
        /// What the kernel says.
        error: io::Error,
    },
}

type Result<T> = std::result::Result<T, TakeoverError>;

fn doing(doing: &'static str) -> impl FnOnce(KernelError) -> TakeoverError {
    move |error| TakeoverError::Kernel { doing, error }
}

/// An address with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceAddress {
    /// The address.
    pub address: IpAddr,
    /// Bits of its network.
    pub prefix: u8,
}

impl FromStr for ServiceAddress {
    type Err = TakeoverError;

    fn from_str(text: &str) -> Result<ServiceAddress> {
        let wrong = || TakeoverError::Address(text.to_owned());
        let (address, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let prefix: u8 = prefix.parse().map_err(|_| wrong())?;
        let usable = !address.is_unspecified() && !address.is_loopback() && !address.is_multicast();
        if !usable || prefix == 0 || prefix > bits(address) {
            return Err(wrong());
        }
        Ok(ServiceAddress { address, prefix })
    }
}

impl fmt::Display for ServiceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl ServiceAddress {
    /// The guest's hardware address: made from the service address, so that it is the same on
    /// every host and the guest sees no change. Locally administered, unicast.
    #[must_use]
    pub fn guest_mac(&self) -> Mac {
        self.mac(b'g')
    }

    fn host_mac(&self) -> Mac {
        self.mac(b'h')
    }

    /// FNV-1a (RFC draft-eastlake-fnv): any hash will do that both hosts share.
    fn hash(&self, salt: u8) -> u64 {
        let octets = match self.address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        octets.into_iter().chain([salt]).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    fn mac(&self, salt: u8) -> Mac {
        let [a, b, c, d, e, ..] = self.hash(salt).to_le_bytes();
        [2, a, b, c, d, e]
    }

    /// Name of the host's end, at most 15 characters.
    #[must_use]
    pub fn host_link(&self) -> String {
        format!("hs{:08x}", self.hash(b'n') as u32)
    }
}

/// How the guest reaches the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// Through this bridge of the host, as if plugged into the same switch.
    Bridge {
        /// The bridge.
        name: String,
        /// The guest's default gateway, if it needs one.
        gateway: Option<IpAddr>,
    },
    /// Through the host's routing; the host answers for the address on this interface. Needs no
    /// bridge, works where a port may have one hardware address only.
    Routed {
        /// The host's interface towards the clients.
        parent: String,
    },
    /// As `Routed`, and every packet goes through the agent, which can hold it.
    Gated {
        /// The host's interface towards the clients.
        parent: String,
    },
}

impl Uplink {
    /// The host's interface that has to be there.
    fn outer(&self) -> &str {
        match self {
            Uplink::Bridge { name, .. } => name,
            Uplink::Routed { parent } | Uplink::Gated { parent } => parent,
        }
    }
}

/// The service address on one host: built, and connected or not. Dropping it takes the interfaces
/// away, and with them the address.
#[derive(Debug)]
pub struct ServiceNetwork {
    service: ServiceAddress,
    uplink: Uplink,
    netlink: Netlink,
    host_end: LinkIndex,
    /// The bridge, or the parent.
    outer: Link,
    announcer: Announcer,
    announced: bool,
    /// The host's end is down.
    cut_off: bool,
    /// Another host answers for the address, and packets pass through that.
    lent: bool,
    gate: Option<Arc<Gate>>,
}

impl ServiceNetwork {
    /// Builds everything in the guest's (or ghost's) network namespace and on the host, the calling
    /// thread's namespace; nothing is connected. Needs CAP_NET_ADMIN and CAP_NET_RAW. On failure
    /// nothing remains.
    pub fn prepare(
        guest: BorrowedFd<'_>,
        service: ServiceAddress,
        uplink: Uplink,
    ) -> Result<ServiceNetwork> {
        let mut netlink = Netlink::open().map_err(doing("open netlink"))?;
        let outer = outer_link(&mut netlink, uplink.outer())?;
        let name = service.host_link();
        // A dead agent's interface of the same name is in the way; its guest is gone as well.
        if let Ok(stale) = netlink.link(&name) {
            netlink.delete_link(stale.index).map_err(doing("remove a stale interface"))?;
        }
        let gate = match &uplink {
            Uplink::Bridge { .. } | Uplink::Routed { .. } => {
                let pair = VethPair {
                    near: &name,
                    near_mac: service.host_mac(),
                    far: GUEST_LINK,
                    far_mac: service.guest_mac(),
                    far_namespace: guest,
                };
                netlink.add_veth(&pair).map_err(doing("make the guest's interface"))?;
                None
            }
            Uplink::Gated { .. } => Some(Arc::new(gate(guest, service.address, &name)?)),
        };
        let host_end = netlink.link(&name).map_err(doing("find the guest's interface"))?.index;
        let built = build(&mut netlink, guest, &service, &uplink, &name, host_end, outer);
        match built {
            Ok(sender) => {
                let mac = match &uplink {
                    Uplink::Bridge { .. } => service.guest_mac(),
                    Uplink::Routed { .. } | Uplink::Gated { .. } => outer.mac,
                };
                let announcer = Announcer::new(sender, frame(service.address, mac));
                Ok(Self {
                    service,
                    uplink,
                    netlink,
                    host_end,
                    outer,
                    announcer,
                    announced: false,
                    cut_off: false,
                    lent: false,
                    gate,
                })
            }
            Err(error) => {
                // The first error is the one to tell.
                let _ = netlink.delete_link(host_end);
                Err(error)
            }
        }
    }

    /// Connects the address to the world and tells the neighbours, in the next seconds some times
    /// more, as long as it stays here. Gives the time the first took. Can be done again: then only
    /// the neighbours are told once more.
    pub fn announce(&mut self) -> Result<Duration> {
        let start = Instant::now();
        if !self.announced {
            self.connect()?;
            self.announced = true;
        } else if self.lent {
            self.answer(true)?;
        }
        self.lent = false;
        self.announcer.announce().map_err(doing("tell the neighbours"))?;
        Ok(start.elapsed())
    }

    fn connect(&mut self) -> Result<()> {
        let (address, end) = (self.service.address, self.host_end);
        if std::mem::take(&mut self.cut_off) {
            self.netlink.set_up(end, true).map_err(doing("take the host's end up again"))?;
            if let Uplink::Routed { .. } = self.uplink {
                // Forgotten when the end went down.
                self.netlink
                    .add_neighbour(end, address, self.service.guest_mac())
                    .map_err(doing("name the guest's hardware address"))?;
            }
        }
        match &self.uplink {
            Uplink::Bridge { .. } => {
                let bridge = Some(self.outer.index);
                self.netlink.set_master(end, bridge).map_err(doing("connect to the bridge"))
            }
            Uplink::Routed { .. } | Uplink::Gated { .. } => {
                let to = Some((address, bits(address)));
                self.netlink.add_route(to, None, end).map_err(doing("route the address"))?;
                self.answer(true)
            }
        }
    }

    /// Whether this host answers whoever asks for the address.
    fn answer(&mut self, answers: bool) -> Result<()> {
        let set = self.netlink.set_proxy(self.outer.index, self.service.address, answers);
        set.map_err(doing("answer for the address, or not"))
    }

    /// Another host has announced the address, and passes on what comes there. What still comes
    /// here is let in. [`ServiceNetwork::announce`] takes it back.
    pub fn lend(&mut self) -> Result<()> {
        if self.announced && !self.lent {
            self.lent = true;
            self.announcer.hush();
            self.answer(false)?;
        }
        Ok(())
    }

    /// Passes packets on to a guest elsewhere and back, through this host's end, if the address
    /// was built so.
    pub fn relay(&self) -> Option<Result<Relay>> {
        let gate = self.gate.as_ref()?;
        let relay = Relay::new(gate.world());
        Some(
            relay.map_err(|error| {
                doing("make the relay")(KernelError::io("make an eventfd")(error))
            }),
        )
    }

    /// Cuts the guest off at once, both ways: after this nothing of it leaves, not even what its
    /// sockets say when it is killed. Neighbours keep sending here until another host announces.
    /// [`ServiceNetwork::announce`] connects it again.
    pub fn withdraw(&mut self) -> Result<()> {
        if !self.announced {
            return Ok(());
        }
        let (address, end) = (self.service.address, self.host_end);
        self.announced = false;
        self.announcer.hush();
        self.cut_off = true;
        let lent = std::mem::take(&mut self.lent);
        // The routes through the end go with it.
        let cut = self.netlink.set_up(end, false);
        let quiet = match &self.uplink {
            Uplink::Bridge { .. } => self.netlink.set_master(end, None),
            Uplink::Routed { .. } | Uplink::Gated { .. } if lent => Ok(()),
            Uplink::Routed { .. } | Uplink::Gated { .. } => {
                self.netlink.set_proxy(self.outer.index, address, false)
            }
        };
        cut.and(quiet).map_err(doing("withdraw the address"))
    }

    /// Whether clients are to reach the address here.
    #[must_use]
    pub fn is_answering(&self) -> bool {
        self.announced && !self.lent
    }

    /// Whether the address is connected.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        self.announced
    }

    /// Lets connections that are made from now on, in the guest's namespace, send at once what was
    /// under way before; or leaves that to the kernel again. Only where output is held: elsewhere
    /// it is not known how much was.
    pub fn lengthen_flights(&self, guest: BorrowedFd<'_>, lengthen: bool) -> Result<()> {
        let Uplink::Gated { .. } = self.uplink else { return Ok(()) };
        within(guest, || {
            let mut netlink = Netlink::open().map_err(doing("open netlink in the guest"))?;
            let link = netlink.link(GUEST_LINK).map_err(doing("find the guest's interface"))?.index;
            let to = everywhere(self.service.address);
            let done = match lengthen {
                true => netlink.add_route_with_flight(to, link, FLIGHT_MAX),
                false => netlink.add_route(Some(to), None, link),
            };
            done.map_err(doing("set the first flight"))
        })
    }

    /// Where all packets pass, if the address was built so.
    #[must_use]
    pub fn gate(&self) -> Option<&Arc<Gate>> {
        self.gate.as_ref()
    }

    /// What it is about.
    #[must_use]
    pub fn service(&self) -> ServiceAddress {
        self.service
    }
}

impl Drop for ServiceNetwork {
    fn drop(&mut self) {
        if let Err(error) = self.withdraw() {
            tracing::warn!(%error, "the service address was not withdrawn");
        }
        if let Some(gate) = &self.gate {
            gate.end();
        }
        // Gone already if the guest's namespace is.
        let _ = self.netlink.delete_link(self.host_end);
    }
}

/// Gives a namespace the service address on an interface that leads nowhere, as long as the result
/// lives: whoever is inside reaches the address, and nothing gets out.
pub fn isolate(guest: BorrowedFd<'_>, service: ServiceAddress) -> Result<Tun> {
    let nowhere =
        within(guest, || Tun::create(GUEST_LINK).map_err(doing("make the guest's interface")))?;
    let uplink = Uplink::Gated { parent: String::new() };
    within(guest, || build_guest(&service, &uplink))?;
    Ok(nowhere)
}

/// Both interfaces, down, and the gate between them.
fn gate(guest: BorrowedFd<'_>, service: IpAddr, host_name: &str) -> Result<Gate> {
    let inner =
        within(guest, || Tun::create(GUEST_LINK).map_err(doing("make the guest's interface")))?;
    let outer = Tun::create(host_name).map_err(doing("make the host's end"))?;
    let gate = Gate::new(service, inner, outer);
    gate.map_err(|error| doing("make the gate")(KernelError::io("make an eventfd")(error)))
}

fn outer_link(netlink: &mut Netlink, name: &str) -> Result<Link> {
    let wrong = |problem| TakeoverError::HostLink { name: name.to_owned(), problem };
    match netlink.link(name) {
        Ok(link) if link.up => Ok(link),
        Ok(_) => Err(wrong("is down")),
        Err(error) if error.errno() == Some(libc::ENODEV) => Err(wrong("does not exist")),
        Err(error) => Err(doing("look at the host's interface")(error)),
    }
}

/// Everything but the connection. Gives where announcements leave: the guest's end of a bridged
/// address, so that the bridge learns the port; the host's interface of a routed one.
fn build(
    netlink: &mut Netlink,
    guest: BorrowedFd<'_>,
    service: &ServiceAddress,
    uplink: &Uplink,
    host_name: &str,
    host_end: LinkIndex,
    outer: Link,
) -> Result<FrameSender> {
    // An IPv6 address of its own on this end would answer the guest; nothing here should.
    setting(
        &format!("ipv6/conf/{host_name}/disable_ipv6"),
        match uplink {
            Uplink::Bridge { .. } => "1",
            Uplink::Routed { .. } | Uplink::Gated { .. } => "0",
        },
    )?;
    if let Uplink::Routed { parent } | Uplink::Gated { parent } = uplink {
        settings_of_a_router(parent, host_name, service.address)?;
    }
    netlink.set_up(host_end, true).map_err(doing("take the host's end up"))?;
    let guest_sender = within(guest, || build_guest(service, uplink))?;
    let outer_sender = || FrameSender::open(outer.index).map_err(doing("open a packet socket"));
    match uplink {
        Uplink::Bridge { .. } => Ok(guest_sender),
        Uplink::Routed { .. } => {
            netlink
                .add_neighbour(host_end, service.address, service.guest_mac())
                .map_err(doing("name the guest's hardware address"))?;
            outer_sender()
        }
        Uplink::Gated { .. } => {
            let length = netlink.set_queue_length(host_end, GATED_QUEUE);
            length.map_err(doing("lengthen the queue of the host's end"))?;
            outer_sender()
        }
    }
}

fn build_guest(service: &ServiceAddress, uplink: &Uplink) -> Result<FrameSender> {
    let mut netlink = Netlink::open().map_err(doing("open netlink in the guest"))?;
    let lookup = doing("find the guest's interface");
    let end = netlink.link(GUEST_LINK).map_err(lookup)?.index;
    let loopback = netlink.link("lo").map_err(doing("find the guest's loopback"))?.index;
    netlink.set_up(loopback, true).map_err(doing("take the guest's loopback up"))?;
    let prefix = match uplink {
        Uplink::Bridge { .. } => service.prefix,
        Uplink::Routed { .. } | Uplink::Gated { .. } => bits(service.address),
    };
    netlink
        .add_address(end, service.address, prefix)
        .map_err(doing("give the guest its address"))?;
    netlink.set_up(end, true).map_err(doing("take the guest's interface up"))?;
    let routed = doing("route the guest's packets");
    match uplink {
        Uplink::Bridge { gateway: None, .. } => {}
        Uplink::Bridge { gateway, .. } => netlink.add_route(None, *gateway, end).map_err(routed)?,
        Uplink::Routed { .. } => {
            let gateway = match service.address {
                IpAddr::V4(_) => ROUTED_GATEWAY_V4.into(),
                IpAddr::V6(_) => ROUTED_GATEWAY_V6.into(),
            };
            netlink
                .add_neighbour(end, gateway, service.host_mac())
                .map_err(doing("name the gateway's hardware address"))?;
            netlink.add_route(None, Some(gateway), end).map_err(routed)?;
        }
        Uplink::Gated { .. } => {
            let length = netlink.set_queue_length(end, GATED_QUEUE);
            length.map_err(doing("lengthen the queue of the guest's interface"))?;
            let to = everywhere(service.address);
            netlink.add_route(Some(to), None, end).map_err(routed)?;
        }
    }
    FrameSender::open(end).map_err(doing("open a packet socket in the guest"))
}

/// All addresses of the family.
fn everywhere(address: IpAddr) -> (IpAddr, u8) {
    match address {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), 0),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), 0),
    }
}

fn settings_of_a_router(parent: &str, host_name: &str, address: IpAddr) -> Result<()> {
    if address.is_ipv4() {
        setting("ipv4/ip_forward", "1")?;
        setting(&format!("ipv4/conf/{parent}/forwarding"), "1")?;
        setting(&format!("ipv4/conf/{host_name}/forwarding"), "1")?;
        // Clients may be reached by another way than they came; redirects would teach them
        // a way around the guest's namespace.
        setting(&format!("ipv4/conf/{host_name}/rp_filter"), "0")?;
        setting(&format!("ipv4/conf/{host_name}/send_redirects"), "0")?;
        // Without this a question for the address waits up to 0.8 s for its answer.
        setting(&format!("ipv4/neigh/{parent}/proxy_delay"), "0")
    } else {
        setting("ipv6/conf/all/forwarding", "1")?;
        // A question to the address itself (a neighbour that makes sure) is answered only if the
        // proxy is on for all interfaces: `ip6_forward` looks at no other setting.
        setting("ipv6/conf/all/proxy_ndp", "1")?;
        setting(&format!("ipv6/conf/{parent}/proxy_ndp"), "1")?;
        setting(&format!("ipv6/neigh/{parent}/proxy_delay"), "0")
    }
}

fn setting(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    // A value that is right already needs no right to write it.
    if fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    match fs::write(&path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && name.starts_with("ipv6") => Ok(()),
        answer => answer.map_err(|error| TakeoverError::Setting { path, error }),
    }
}

/// Runs `work` on a thread inside the network namespace.
fn within<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let done = hotspare_kernel::namespace::on_a_thread(|| {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|errno| {
            let error = KernelError::from_errno("enter the namespace", errno as i32);
            doing("build the guest's network")(error)
        })?;
        work()
    });
    done.map_err(KernelError::io("start a thread")).map_err(doing("build the guest's network"))?
}
