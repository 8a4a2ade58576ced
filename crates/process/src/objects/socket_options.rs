//! Socket options: one table of what is read at capture and set at restore, for all kinds.
//!
//! There are about sixty on a TCP socket and no call reads more than one, so reading all at each
//! stop would cost more than everything else about a socket. They are read at the first two
//! stops that see a socket, when programs set them, and from then on at every 32nd: a change on
//! an old socket is on the spare 32 epochs later at most. A corked socket is read every time, as
//! the cork comes and goes with each reply and must not stay by mistake. A capture that has to be
//! exact, before a planned switchover, reads all.
//!
//! Only what differs from a new socket of the same kind travels. An option that this kernel does
//! not know is left out of the table at the first look. Options that no getsockopt(2) shows
//! (multicast memberships, TCP_MD5SIG keys, IPsec policies) cannot be in it: see LIMITS.md.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};

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

struct Rule(i32, i32, Way);

const fn plain(level: i32, name: i32) -> Rule {
    Rule(level, name, Way::Plain)
}

const GENERIC: &[Rule] = &[
    Rule(SOCKET, libc::SO_SNDBUF, Way::Buffer(libc::SO_SNDBUFFORCE)),
    Rule(SOCKET, libc::SO_RCVBUF, Way::Buffer(libc::SO_RCVBUFFORCE)),
    Rule(SOCKET, SO_BUF_LOCK, Way::Last),
    plain(SOCKET, libc::SO_RCVLOWAT),
    plain(SOCKET, libc::SO_RCVTIMEO),
    plain(SOCKET, libc::SO_SNDTIMEO),
    // After IP_TOS, which sets it too.
    Rule(SOCKET, libc::SO_PRIORITY, Way::Last),
    plain(SOCKET, libc::SO_MARK),
    plain(SOCKET, libc::SO_TIMESTAMP),
    plain(SOCKET, libc::SO_TIMESTAMPNS),
    plain(SOCKET, libc::SO_TIMESTAMPING),
    plain(SOCKET, libc::SO_LINGER),
    Rule(SOCKET, SO_LOCK_FILTER, Way::Last),
];

const UNIX: &[Rule] = &[
    plain(SOCKET, libc::SO_PASSCRED),
    plain(SOCKET, libc::SO_PASSSEC),
    plain(SOCKET, SO_PASSPIDFD),
    plain(SOCKET, SO_PASSRIGHTS),
    Rule(SOCKET, libc::SO_PEEK_OFF, Way::Last),
];

const INTERNET: &[Rule] = &[
    Rule(SOCKET, libc::SO_REUSEADDR, Way::AfterBind),
    plain(SOCKET, libc::SO_REUSEPORT),
    plain(SOCKET, libc::SO_KEEPALIVE),
    plain(SOCKET, libc::SO_OOBINLINE),
    plain(SOCKET, libc::SO_BINDTODEVICE),
    plain(SOCKET, libc::SO_DONTROUTE),
    plain(SOCKET, libc::SO_BUSY_POLL),
    plain(SOCKET, SO_PREFER_BUSY_POLL),
    plain(SOCKET, SO_BUSY_POLL_BUDGET),
    plain(SOCKET, SO_MAX_PACING_RATE),
    plain(SOCKET, libc::SO_ZEROCOPY),
    plain(SOCKET, SO_RCVMARK),
    plain(SOCKET, SO_RCVPRIORITY),
    plain(IP, libc::IP_TOS),
    plain(IP, libc::IP_TTL),
    plain(IP, libc::IP_MTU_DISCOVER),
    plain(IP, libc::IP_RECVERR),
    Rule(IP, libc::IP_FREEBIND, Way::AfterBind),
    Rule(IP, libc::IP_TRANSPARENT, Way::AfterBind),
    plain(IP, libc::IP_MINTTL),
    plain(IP, libc::IP_BIND_ADDRESS_NO_PORT),
    plain(IP, IP_LOCAL_PORT_RANGE),
    Rule(SOCKET, libc::SO_PEEK_OFF, Way::Last),
];

const INTERNET6: &[Rule] = &[
    plain(IPV6, libc::IPV6_V6ONLY),
    plain(IPV6, libc::IPV6_UNICAST_HOPS),
    plain(IPV6, libc::IPV6_TCLASS),
    plain(IPV6, libc::IPV6_MTU_DISCOVER),
    plain(IPV6, libc::IPV6_RECVERR),
    Rule(IPV6, libc::IPV6_FREEBIND, Way::AfterBind),
    Rule(IPV6, libc::IPV6_TRANSPARENT, Way::AfterBind),
    plain(IPV6, libc::IPV6_DONTFRAG),
    plain(IPV6, libc::IPV6_AUTOFLOWLABEL),
    plain(IPV6, IPV6_MINHOPCOUNT),
    plain(IPV6, IPV6_ADDR_PREFERENCES),
];

const STREAM: &[Rule] = &[
    plain(TCP, libc::TCP_NODELAY),
    plain(TCP, libc::TCP_CORK),
    plain(TCP, libc::TCP_KEEPIDLE),
    plain(TCP, libc::TCP_KEEPINTVL),
    plain(TCP, libc::TCP_KEEPCNT),
    plain(TCP, libc::TCP_SYNCNT),
    plain(TCP, libc::TCP_LINGER2),
    plain(TCP, libc::TCP_DEFER_ACCEPT),
    plain(TCP, libc::TCP_CONGESTION),
    plain(TCP, libc::TCP_USER_TIMEOUT),
    plain(TCP, libc::TCP_NOTSENT_LOWAT),
    plain(TCP, libc::TCP_INQ),
    plain(TCP, TCP_TX_DELAY),
    plain(TCP, TCP_RTO_MAX_MS),
    plain(TCP, TCP_RTO_MIN_US),
    plain(TCP, TCP_DELACK_MAX_US),
    plain(SOCKET, SO_TXREHASH),
    Rule(TCP, libc::TCP_SAVE_SYN, Way::NotConnected),
    Rule(TCP, libc::TCP_MAXSEG, Way::NotConnected),
    Rule(TCP, libc::TCP_WINDOW_CLAMP, Way::NotConnected),
    Rule(TCP, libc::TCP_FASTOPEN, Way::NotConnected),
    Rule(TCP, libc::TCP_FASTOPEN_CONNECT, Way::AfterConnect),
];

const DATAGRAM: &[Rule] = &[
    plain(SOCKET, libc::SO_BROADCAST),
    plain(SOCKET, libc::SO_RXQ_OVFL),
    plain(SOCKET, libc::SO_NO_CHECK),
    plain(SOCKET, libc::SO_TXTIME),
    plain(SOCKET, libc::SO_SELECT_ERR_QUEUE),
    plain(IP, libc::IP_PKTINFO),
    plain(IP, libc::IP_RECVTTL),
    plain(IP, libc::IP_RECVTOS),
    plain(IP, libc::IP_RECVOPTS),
    plain(IP, libc::IP_RETOPTS),
    plain(IP, libc::IP_RECVORIGDSTADDR),
    plain(IP, libc::IP_MULTICAST_TTL),
    plain(IP, libc::IP_MULTICAST_LOOP),
    plain(IP, libc::IP_MULTICAST_ALL),
    plain(IP, libc::IP_UNICAST_IF),
    Rule(UDP, libc::UDP_CORK, Way::Last),
    plain(UDP, libc::UDP_SEGMENT),
    plain(UDP, libc::UDP_GRO),
];

const DATAGRAM6: &[Rule] = &[
    plain(IPV6, libc::IPV6_RECVPKTINFO),
    plain(IPV6, libc::IPV6_RECVHOPLIMIT),
    plain(IPV6, libc::IPV6_RECVTCLASS),
    plain(IPV6, libc::IPV6_RECVORIGDSTADDR),
    plain(IPV6, libc::IPV6_MULTICAST_HOPS),
    plain(IPV6, libc::IPV6_MULTICAST_LOOP),
    plain(IPV6, libc::IPV6_MULTICAST_IF),
    plain(IPV6, libc::IPV6_UNICAST_IF),
    plain(UDP, UDP_NO_CHECK6_TX),
    plain(UDP, UDP_NO_CHECK6_RX),
];

const NETLINKS: &[Rule] = &[
    plain(NETLINK, libc::NETLINK_PKTINFO),
    plain(NETLINK, libc::NETLINK_BROADCAST_ERROR),
    plain(NETLINK, libc::NETLINK_NO_ENOBUFS),
    plain(NETLINK, libc::NETLINK_LISTEN_ALL_NSID),
    plain(NETLINK, libc::NETLINK_CAP_ACK),
    plain(NETLINK, libc::NETLINK_EXT_ACK),
    plain(NETLINK, NETLINK_GET_STRICT_CHK),
];

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

    fn rules(self) -> Vec<&'static Rule> {
        let internet6 = self.domain == libc::AF_INET6;
        let internet = internet6 || self.domain == libc::AF_INET;
        let udp = internet && !self.is_tcp();
        let parts: [(bool, &'static [Rule]); 8] = [
            (true, GENERIC),
            (self.domain == libc::AF_UNIX, UNIX),
            (internet, INTERNET),
            (internet6, INTERNET6),
            (internet && self.is_tcp(), STREAM),
            (udp, DATAGRAM),
            (udp && internet6, DATAGRAM6),
            (self.domain == libc::AF_NETLINK, NETLINKS),
        ];
        parts.iter().filter(|(applies, _)| *applies).flat_map(|(_, rules)| *rules).collect()
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
    rules: Vec<(&'static Rule, Value)>,
}

/// Stops at which a new socket's options are read.
const FIRST_STOPS: u64 = 2;
/// Of so many stops, options of an older socket are read at one.
const STOPS_PER_READ: u64 = 32;

/// Options of one socket as they were last read.
struct Remembered {
    options: Vec<SocketOption>,
    connected: bool,
    stops: u64,
    seen: u64,
}

impl Remembered {
    fn is_fresh(&self, inode: u64, connected: bool) -> bool {
        let corked = option_value(&self.options, TCP, libc::TCP_CORK).is_some();
        // Each socket has its own turn: inode numbers, often all odd or all even, are scattered.
        let turn = inode.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let due = (self.stops + turn).is_multiple_of(STOPS_PER_READ);
        self.stops >= FIRST_STOPS && !due && !corked && self.connected == connected
    }
}

/// Reads options; remembers what a new socket's are, and what each socket's were.
#[derive(Default)]
pub struct OptionReader {
    known: HashMap<SocketKind, Known>,
    remembered: HashMap<u64, Remembered>,
    epoch: u64,
    exact: bool,
}

impl OptionReader {
    fn known(&mut self, kind: SocketKind) -> ObjectResult<&Known> {
        match self.known.entry(kind) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let fresh = create(kind.domain, kind.kind, kind.protocol)?;
                let rules = kind.rules().into_iter();
                let rules = rules.filter_map(|rule| Some((rule, read(fresh.as_fd(), rule)?)));
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
        let mut stops = 0;
        if let Some(remembered) = self.remembered.get_mut(&inode) {
            (remembered.stops, remembered.seen) = (remembered.stops + 1, seen);
            stops = remembered.stops;
            if !exact && remembered.is_fresh(inode, connected) {
                return Ok(remembered.options.clone());
            }
        }
        let options = self.read_all(fd, kind, connected)?;
        let remembered = Remembered { options: options.clone(), connected, stops, seen };
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
            options.push(SocketOption { level: SOCKET, name, value: program });
        }
        Ok(options)
    }
}

/// Leaves out buffer sizes of TCP sockets that the kernel chose and will choose again. A receive
/// buffer that it let grow is kept, because the peer has been told of it.
fn leave_to_kernel(options: &mut Vec<SocketOption>, kind: SocketKind, rules: &[(&Rule, Value)]) {
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
    let rules = all.iter().flat_map(|rules| rules.iter());
    let rule = rules.into_iter().find(|rule| (rule.0, rule.1) == (option.level, option.name));
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
