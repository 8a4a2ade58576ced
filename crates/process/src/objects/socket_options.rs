//! Socket options: one table of what is read at capture and set at restore, for all kinds.
//!
//! There are about sixty on a TCP socket and no call reads more than one, so reading all at each
//! stop would cost more than everything else about a socket. They are read at the first two
//! stops that see a socket, when programs set them, and from then on at every 32nd, unless they
//! were read within the last second (stops that output asks for come a hundred times a second): a
//! change on an old socket is on the spare 32 epochs later at most, or a second and 32 epochs. Of
//! sockets that rest
//! ([`super::resting`]), at most 64 of a process are read at a stop. A corked socket is read every
//! time, as the cork comes and goes with each reply and must not stay by mistake. A capture that
//! has to be exact, before a planned switchover, reads all.
//!
//! Only what differs from a new socket of the same kind travels. An option that this kernel does
//! not know is left out of the table at the first look. Options that no getsockopt(2) shows
//! (multicast memberships, TCP_MD5SIG keys, IPsec policies) cannot be in it: see LIMITS.md.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use hotspare_image::sockets::SocketOption;
use hotspare_kernel::socket::{
    attach_filter, create, filter, get_option, set_option, set_option_i32,
};

use super::error::{ObjectError, ObjectResult};

const SOCKET: i32 = libc::SOL_SOCKET;
const IP: i32 = libc::IPPROTO_IP;
const IPV6: i32 = libc::IPPROTO_IPV6;
const TCP: i32 = libc::IPPROTO_TCP;
const UDP: i32 = libc::IPPROTO_UDP;
const NETLINK: i32 = libc::SOL_NETLINK;

/// Largest value of an option in the table: names of devices and congestion controls.
const VALUE_BYTES_MAX: usize = 16;

/// Names that libc lacks (asm-generic/socket.h, linux/tcp.h, linux/in.h, linux/in6.h).
mod name {
    pub const SO_BUF_LOCK: i32 = 72;
    pub const SO_TXREHASH: i32 = 74;
    pub const SO_RCVMARK: i32 = 75;
    pub const SO_PASSPIDFD: i32 = 76;
    pub const SO_RCVPRIORITY: i32 = 82;
    pub const SO_PASSRIGHTS: i32 = 83;
    pub const SO_PREFER_BUSY_POLL: i32 = 69;
    pub const SO_BUSY_POLL_BUDGET: i32 = 70;
    pub const SO_MAX_PACING_RATE: i32 = 47;
    pub const SO_LOCK_FILTER: i32 = 44;
    pub const TCP_ULP: i32 = 31;
    pub const TCP_TX_DELAY: i32 = 37;
    pub const TCP_RTO_MAX_MS: i32 = 44;
    pub const TCP_RTO_MIN_US: i32 = 45;
    pub const TCP_DELACK_MAX_US: i32 = 46;
    pub const IP_LOCAL_PORT_RANGE: i32 = 51;
    pub const IPV6_ADDR_PREFERENCES: i32 = 72;
    pub const IPV6_MINHOPCOUNT: i32 = 73;
    pub const UDP_NO_CHECK6_TX: i32 = 101;
    pub const UDP_NO_CHECK6_RX: i32 = 102;
    pub const NETLINK_GET_STRICT_CHK: i32 = 12;
}
use name::*;

/// How an option is put back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As it was read, as soon as the socket exists.
    Plain,
    /// Needed for bind(2) to succeed twice; given its value when the socket is in place.
    AfterBind,
    /// Means something else, or nothing, on a connection: for listeners and new sockets only.
    NotConnected,
    /// Would change what connect(2) does.
    AfterConnect,
    /// A buffer size: the kernel doubles what it is given.
    Buffer(i32),
    /// Last of all.
    Last,
}

/// Options of one level that are put back in one way.
struct Rules(i32, Way, &'static [i32]);

/// One of them.
#[derive(Clone, Copy)]
struct Rule(i32, i32, Way);

fn each(groups: &'static [Rules]) -> impl Iterator<Item = Rule> {
    groups
        .iter()
        .flat_map(|Rules(level, way, names)| names.iter().map(|name| Rule(*level, *name, *way)))
}

const GENERIC: &[Rules] = &[
    Rules(
        SOCKET,
        Way::Plain,
        &[
            libc::SO_RCVLOWAT,
            libc::SO_RCVTIMEO,
            libc::SO_SNDTIMEO,
            libc::SO_MARK,
            libc::SO_TIMESTAMP,
            libc::SO_TIMESTAMPNS,
            libc::SO_TIMESTAMPING,
            libc::SO_LINGER,
        ],
    ),
    Rules(SOCKET, Way::Buffer(libc::SO_SNDBUFFORCE), &[libc::SO_SNDBUF]),
    Rules(SOCKET, Way::Buffer(libc::SO_RCVBUFFORCE), &[libc::SO_RCVBUF]),
    // After IP_TOS, which sets it too.
    Rules(SOCKET, Way::Last, &[SO_BUF_LOCK, libc::SO_PRIORITY, SO_LOCK_FILTER]),
];

const UNIX: &[Rules] = &[
    Rules(SOCKET, Way::Plain, &[libc::SO_PASSCRED, libc::SO_PASSSEC, SO_PASSPIDFD, SO_PASSRIGHTS]),
    Rules(SOCKET, Way::Last, &[libc::SO_PEEK_OFF]),
];

const INTERNET: &[Rules] = &[
    Rules(
        SOCKET,
        Way::Plain,
        &[
            libc::SO_REUSEPORT,
            libc::SO_KEEPALIVE,
            libc::SO_OOBINLINE,
            libc::SO_BINDTODEVICE,
            libc::SO_DONTROUTE,
            libc::SO_BUSY_POLL,
            SO_PREFER_BUSY_POLL,
            SO_BUSY_POLL_BUDGET,
            SO_MAX_PACING_RATE,
            libc::SO_ZEROCOPY,
            SO_RCVMARK,
            SO_RCVPRIORITY,
        ],
    ),
    Rules(
        IP,
        Way::Plain,
        &[
            libc::IP_TOS,
            libc::IP_TTL,
            libc::IP_MTU_DISCOVER,
            libc::IP_RECVERR,
            libc::IP_MINTTL,
            libc::IP_BIND_ADDRESS_NO_PORT,
            IP_LOCAL_PORT_RANGE,
        ],
    ),
    Rules(SOCKET, Way::AfterBind, &[libc::SO_REUSEADDR]),
    Rules(IP, Way::AfterBind, &[libc::IP_FREEBIND, libc::IP_TRANSPARENT]),
    Rules(SOCKET, Way::Last, &[libc::SO_PEEK_OFF]),
];

const INTERNET6: &[Rules] = &[
    Rules(
        IPV6,
        Way::Plain,
        &[
            libc::IPV6_V6ONLY,
            libc::IPV6_UNICAST_HOPS,
            libc::IPV6_TCLASS,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_RECVERR,
            libc::IPV6_DONTFRAG,
            libc::IPV6_AUTOFLOWLABEL,
            IPV6_MINHOPCOUNT,
            IPV6_ADDR_PREFERENCES,
        ],
    ),
    Rules(IPV6, Way::AfterBind, &[libc::IPV6_FREEBIND, libc::IPV6_TRANSPARENT]),
];

const STREAM: &[Rules] = &[
    Rules(
        TCP,
        Way::Plain,
        &[
            libc::TCP_NODELAY,
            libc::TCP_CORK,
            libc::TCP_KEEPIDLE,
            libc::TCP_KEEPINTVL,
            libc::TCP_KEEPCNT,
            libc::TCP_SYNCNT,
            libc::TCP_LINGER2,
            libc::TCP_DEFER_ACCEPT,
            libc::TCP_CONGESTION,
            libc::TCP_USER_TIMEOUT,
            libc::TCP_NOTSENT_LOWAT,
            libc::TCP_INQ,
            TCP_TX_DELAY,
            TCP_RTO_MAX_MS,
            TCP_RTO_MIN_US,
            TCP_DELACK_MAX_US,
        ],
    ),
    Rules(SOCKET, Way::Plain, &[SO_TXREHASH]),
    Rules(
        TCP,
        Way::NotConnected,
        &[libc::TCP_SAVE_SYN, libc::TCP_MAXSEG, libc::TCP_WINDOW_CLAMP, libc::TCP_FASTOPEN],
    ),
    Rules(TCP, Way::AfterConnect, &[libc::TCP_FASTOPEN_CONNECT]),
];

const DATAGRAM: &[Rules] = &[
    Rules(
        SOCKET,
        Way::Plain,
        &[
            libc::SO_BROADCAST,
            libc::SO_RXQ_OVFL,
            libc::SO_NO_CHECK,
            libc::SO_TXTIME,
            libc::SO_SELECT_ERR_QUEUE,
        ],
    ),
    Rules(
        IP,
        Way::Plain,
        &[
            libc::IP_PKTINFO,
            libc::IP_RECVTTL,
            libc::IP_RECVTOS,
            libc::IP_RECVOPTS,
            libc::IP_RETOPTS,
            libc::IP_RECVORIGDSTADDR,
            libc::IP_MULTICAST_TTL,
            libc::IP_MULTICAST_LOOP,
            libc::IP_MULTICAST_ALL,
            libc::IP_UNICAST_IF,
        ],
    ),
    Rules(UDP, Way::Plain, &[libc::UDP_SEGMENT, libc::UDP_GRO]),
    Rules(UDP, Way::Last, &[libc::UDP_CORK]),
];

const DATAGRAM6: &[Rules] = &[
    Rules(
        IPV6,
        Way::Plain,
        &[
            libc::IPV6_RECVPKTINFO,
            libc::IPV6_RECVHOPLIMIT,
            libc::IPV6_RECVTCLASS,
            libc::IPV6_RECVORIGDSTADDR,
            libc::IPV6_MULTICAST_HOPS,
            libc::IPV6_MULTICAST_LOOP,
            libc::IPV6_MULTICAST_IF,
            libc::IPV6_UNICAST_IF,
        ],
    ),
    Rules(UDP, Way::Plain, &[UDP_NO_CHECK6_TX, UDP_NO_CHECK6_RX]),
];

const NETLINKS: &[Rules] = &[Rules(
    NETLINK,
    Way::Plain,
    &[
        libc::NETLINK_PKTINFO,
        libc::NETLINK_BROADCAST_ERROR,
        libc::NETLINK_NO_ENOBUFS,
        libc::NETLINK_LISTEN_ALL_NSID,
        libc::NETLINK_CAP_ACK,
        libc::NETLINK_EXT_ACK,
        NETLINK_GET_STRICT_CHK,
    ],
)];

/// A kind of socket, as far as options go: what socket(2) takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketKind {
    /// `AF_*`.
    pub domain: i32,
    /// `SOCK_*`.
    pub kind: i32,
    /// `IPPROTO_*`, `NETLINK_*`.
    pub protocol: i32,
}

impl SocketKind {
    fn is_tcp(self) -> bool {
        self.kind == libc::SOCK_STREAM && [TCP, libc::IPPROTO_MPTCP].contains(&self.protocol)
    }

    fn rules(self) -> Vec<Rule> {
        let internet6 = self.domain == libc::AF_INET6;
        let internet = internet6 || self.domain == libc::AF_INET;
        let udp = internet && !self.is_tcp();
        let parts: [(bool, &'static [Rules]); 8] = [
            (true, GENERIC),
            (self.domain == libc::AF_UNIX, UNIX),
            (internet, INTERNET),
            (internet6, INTERNET6),
            (internet && self.is_tcp(), STREAM),
            (udp, DATAGRAM),
            (udp && internet6, DATAGRAM6),
            (self.domain == libc::AF_NETLINK, NETLINKS),
        ];
        parts.iter().filter(|(applies, _)| *applies).flat_map(|(_, rules)| each(rules)).collect()
    }
}

/// An option's value, inline.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Value {
    bytes: [u8; VALUE_BYTES_MAX],
    length: usize,
}

fn read(fd: BorrowedFd<'_>, rule: &Rule) -> Option<Value> {
    let mut bytes = [0u8; VALUE_BYTES_MAX];
    let length = get_option(fd, rule.0, rule.1, &mut bytes).ok()?.min(VALUE_BYTES_MAX);
    Some(Value { bytes, length })
}

/// The options of one kind of socket that this kernel knows, with their values on a new socket.
struct Known {
    rules: Vec<(Rule, Value)>,
}

/// Stops at which a new socket's options are read.
const FIRST_STOPS: u64 = 2;
/// Of so many stops, options of an older socket are read at one.
const STOPS_PER_READ: u64 = 32;
/// But not sooner after they were read than this.
const READ_LASTS: Duration = Duration::from_secs(1);

/// Options of one socket as they were last read.
#[derive(Debug)]
pub struct Remembered {
    options: Vec<SocketOption>,
    connected: bool,
    stops: u64,
    read: Instant,
    seen: u64,
}

impl Remembered {
    /// At its stop number `stops`.
    fn is_fresh(&self, inode: u64, stops: u64, connected: bool) -> bool {
        let corked = option_value(&self.options, TCP, libc::TCP_CORK).is_some();
        // Each socket has its own turn: inode numbers, often all odd or all even, are scattered.
        let turn = inode.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let due =
            (stops + turn).is_multiple_of(STOPS_PER_READ) && self.read.elapsed() >= READ_LASTS;
        stops >= FIRST_STOPS && !due && !corked && self.connected == connected
    }
}

/// Reads options; remembers what a new socket's are, and what each socket's were.
#[derive(Default)]
pub struct OptionReader {
    known: HashMap<SocketKind, Known>,
    remembered: HashMap<u64, Remembered>,
    epoch: u64,
    exact: bool,
    from_memory: bool,
}

impl OptionReader {
    /// Whether the last answer was what an earlier stop had read: what else changes as seldom need
    /// not be asked then either.
    pub fn was_from_memory(&self) -> bool {
        self.from_memory
    }

    fn known(&mut self, kind: SocketKind) -> ObjectResult<&Known> {
        match self.known.entry(kind) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let fresh = create(kind.domain, kind.kind, kind.protocol)?;
                let rules = kind.rules().into_iter();
                let rules = rules.filter_map(|rule| Some((rule, read(fresh.as_fd(), &rule)?)));
                Ok(entry.insert(Known { rules: rules.collect() }))
            }
        }
    }

    /// A new epoch begins. `exact`: all options are read in it. Sockets that were not seen in
    /// the last one are forgotten.
    pub fn begin_epoch(&mut self, exact: bool) {
        let last = self.epoch;
        self.remembered.retain(|_, remembered| remembered.seen == last);
        self.epoch += 1;
        self.exact = exact;
    }

    /// Whether all options are read in this epoch.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// Forgets a socket that rests, and gives what is known of it.
    pub fn take(&mut self, inode: u64) -> Option<Remembered> {
        self.remembered.remove(&inode)
    }

    /// A socket rests no more.
    pub fn put_back(&mut self, inode: u64, remembered: Remembered) {
        self.remembered.insert(inode, Remembered { seen: self.epoch, ..remembered });
    }

    /// Whether the options of a socket need not be read at this stop; it counts as one that has
    /// seen the socket then.
    pub fn are_fresh(&mut self, inode: u64, connected: bool) -> bool {
        let (seen, exact) = (self.epoch, self.exact);
        let Some(remembered) = self.remembered.get_mut(&inode) else { return false };
        let stops = remembered.stops + 1;
        let fresh = !exact && remembered.is_fresh(inode, stops, connected);
        if fresh {
            (remembered.stops, remembered.seen) = (stops, seen);
            self.from_memory = true;
        }
        fresh
    }

    /// Options of socket `inode` that differ from a new one's. `connected` leaves out those that
    /// mean something else on a connection.
    pub fn capture(
        &mut self,
        fd: BorrowedFd<'_>,
        inode: u64,
        kind: SocketKind,
        connected: bool,
    ) -> ObjectResult<Vec<SocketOption>> {
        let (seen, exact) = (self.epoch, self.exact);
        self.from_memory = true;
        let mut stops = 0;
        if let Some(remembered) = self.remembered.get_mut(&inode) {
            (remembered.stops, remembered.seen) = (remembered.stops + 1, seen);
            stops = remembered.stops;
            if !exact && remembered.is_fresh(inode, stops, connected) {
                return Ok(remembered.options.clone());
            }
        }
        self.from_memory = false;
        let options = self.read_all(fd, kind, connected)?;
        let read = Instant::now();
        let remembered = Remembered { options: options.clone(), connected, stops, read, seen };
        self.remembered.insert(inode, remembered);
        Ok(options)
    }

    fn read_all(
        &mut self,
        fd: BorrowedFd<'_>,
        kind: SocketKind,
        connected: bool,
    ) -> ObjectResult<Vec<SocketOption>> {
        let mut options = Vec::new();
        for (rule, fresh) in &self.known(kind)?.rules {
            if connected && rule.2 == Way::NotConnected {
                continue;
            }
            let Some(value) = read(fd, rule) else { continue };
            if value != *fresh {
                let value = value.bytes[..value.length].to_vec();
                options.push(SocketOption { level: rule.0, name: rule.1, value });
            }
        }
        leave_to_kernel(&mut options, kind, &self.known(kind)?.rules);
        let program = filter(fd).map_err(|_| {
            ObjectError::refused("a socket", "an eBPF program is attached, which cannot be read")
        })?;
        if !program.is_empty() {
            let name = libc::SO_ATTACH_FILTER;
            // First: SO_LOCK_FILTER lets none come after it.
            options.insert(0, SocketOption { level: SOCKET, name, value: program });
        }
        Ok(options)
    }
}

/// Leaves out buffer sizes of TCP sockets that the kernel chose and will choose again. A receive
/// buffer that it let grow is kept, because the peer has been told of it.
fn leave_to_kernel(options: &mut Vec<SocketOption>, kind: SocketKind, rules: &[(Rule, Value)]) {
    let locked = option_value(options, SOCKET, SO_BUF_LOCK).unwrap_or(0);
    let fresh = rules.iter().find(|(rule, _)| (rule.0, rule.1) == (SOCKET, libc::SO_RCVBUF));
    let fresh =
        fresh.map_or(0, |(_, value)| value.bytes[..4].try_into().map_or(0, i32::from_ne_bytes));
    options.retain(|option| match (option.level, option.name) {
        (SOCKET, libc::SO_SNDBUF) => !kind.is_tcp() || locked & SEND_LOCKED != 0,
        (SOCKET, libc::SO_RCVBUF) => {
            let size = option.value.get(..4).and_then(|bytes| bytes.try_into().ok());
            let grown = size.map_or(0, i32::from_ne_bytes) > fresh;
            !kind.is_tcp() || locked & RECEIVE_LOCKED != 0 || grown
        }
        _ => true,
    });
}

/// Bits of `SO_BUF_LOCK` (linux/socket.h).
const SEND_LOCKED: i32 = 1;
const RECEIVE_LOCKED: i32 = 2;

/// Refuses a connection whose bytes go through an upper layer in the kernel (kTLS).
pub fn refuse_upper_layer(fd: BorrowedFd<'_>) -> ObjectResult<()> {
    let mut value = [0u8; VALUE_BYTES_MAX];
    match get_option(fd, TCP, TCP_ULP, &mut value) {
        Ok(length) if length > 0 && value[0] != 0 => {
            let name = String::from_utf8_lossy(&value[..length]).replace('\0', "");
            Err(ObjectError::refused(
                "a TCP connection",
                format!("its bytes go through `{name}` in the kernel; switch kernel TLS off"),
            ))
        }
        _ => Ok(()),
    }
}

/// A point in a socket's restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The socket is new. Makes room for queues and lets several sockets share a port.
    Created,
    /// Bound, connected, queues filled: everything has its final value afterwards.
    InPlace,
}

fn way(option: &SocketOption) -> Way {
    let all = [GENERIC, UNIX, INTERNET, INTERNET6, STREAM, DATAGRAM, DATAGRAM6, NETLINKS];
    let mut rules = all.into_iter().flat_map(each);
    let rule = rules.find(|rule| (rule.0, rule.1) == (option.level, option.name));
    rule.map_or(Way::Last, |rule| rule.2)
}

fn set_buffer(fd: BorrowedFd<'_>, forced_name: i32, value: &[u8]) -> ObjectResult<()> {
    let doubled = value.try_into().map_or(0, i32::from_ne_bytes);
    Ok(set_option_i32(fd, SOCKET, forced_name, doubled / 2)?)
}

/// Sets the options that belong to `moment`.
pub fn restore_options(
    fd: BorrowedFd<'_>,
    options: &[SocketOption],
    moment: Moment,
) -> ObjectResult<()> {
    for option in options {
        let named = |source| ObjectError::Kernel {
            what: format!("restore socket option {}/{}", option.level, option.name),
            source,
        };
        if option.name == libc::SO_ATTACH_FILTER && option.level == SOCKET {
            if moment == Moment::InPlace {
                attach_filter(fd, &option.value).map_err(named)?;
            }
            continue;
        }
        match (way(option), moment) {
            (Way::Plain | Way::NotConnected, Moment::Created)
            | (Way::AfterBind | Way::AfterConnect | Way::Last, Moment::InPlace) => {
                set_option(fd, option.level, option.name, &option.value).map_err(named)?;
            }
            (Way::Buffer(forced), _) => set_buffer(fd, forced, &option.value)?,
            (Way::Plain | Way::NotConnected, Moment::InPlace)
            | (Way::AfterBind | Way::AfterConnect | Way::Last, Moment::Created) => {}
        }
    }
    let sized = options.iter().any(|option| matches!(way(option), Way::Buffer(_)));
    if moment == Moment::InPlace && sized {
        release_buffers(fd, options)?;
    }
    Ok(())
}

/// A buffer that was sized by force counts as sized by its owner, and would never grow by
/// itself again. Only where the guest had locked it, it stays so.
pub fn release_buffers(fd: BorrowedFd<'_>, options: &[SocketOption]) -> ObjectResult<()> {
    if option_value(options, SOCKET, SO_BUF_LOCK).is_none() {
        set_option_i32(fd, SOCKET, SO_BUF_LOCK, 0)?;
    }
    Ok(())
}

/// The `int` value of an option, where it is not a new socket's.
pub fn option_value(options: &[SocketOption], level: i32, name: i32) -> Option<i32> {
    let option = options.iter().find(|option| (option.level, option.name) == (level, name))?;
    Some(i32::from_ne_bytes(option.value.get(..4)?.try_into().ok()?))
}
