//! Sockets.

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};

use minicbor::{Decode, Encode};

use crate::objects::FileId;
use crate::tree::{GuestPid, HostPath};

/// Address families (Linux, every architecture).
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// An address as the kernel's `struct sockaddr` bytes, family first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct SocketAddress(
    #[n(0)]
    #[cbor(with = "minicbor::bytes")]
    pub Vec<u8>,
);

impl SocketAddress {
    /// The internet address and port, if it is AF_INET or AF_INET6. An IPv4 address that is
    /// mapped into IPv6 stays IPv6.
    pub fn internet(&self) -> Option<SocketAddr> {
        let bytes = &self.0;
        let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
        let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
        match family {
            AF_INET => {
                let address: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
                Some(SocketAddrV4::new(address.into(), port).into())
            }
            AF_INET6 => {
                let flow = u32::from_be_bytes(bytes.get(4..8)?.try_into().ok()?);
                let address: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
                let scope = u32::from_ne_bytes(bytes.get(24..28)?.try_into().ok()?);
                Some(SocketAddrV6::new(address.into(), port, flow, scope).into())
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for SocketAddress {
    fn from(address: SocketAddr) -> Self {
        let mut bytes = Vec::with_capacity(28);
        match address {
            SocketAddr::V4(v4) => {
                bytes.extend(AF_INET.to_ne_bytes());
                bytes.extend(v4.port().to_be_bytes());
                bytes.extend(v4.ip().octets());
                bytes.extend([0; 8]);
            }
            SocketAddr::V6(v6) => {
                bytes.extend(AF_INET6.to_ne_bytes());
                bytes.extend(v6.port().to_be_bytes());
                bytes.extend(v6.flowinfo().to_be_bytes());
                bytes.extend(v6.ip().octets());
                bytes.extend(v6.scope_id().to_ne_bytes());
            }
        }
        Self(bytes)
    }
}

/// A socket option: level, name, value.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct SocketOption {
    /// `SOL_SOCKET`, `IPPROTO_TCP`, …
    #[n(0)]
    pub level: i32,
    /// `SO_*`, `TCP_*`, …
    #[n(1)]
    pub name: i32,
    /// The bytes getsockopt(2) returned.
    #[n(2)]
    #[cbor(with = "minicbor::bytes")]
    pub value: Vec<u8>,
}

/// A message in a socket's receive queue.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct QueuedMessage {
    /// Sender, where the receiver can see it.
    #[n(0)]
    pub from: Option<SocketAddress>,
    /// The bytes.
    #[n(1)]
    #[cbor(with = "minicbor::bytes")]
    pub bytes: Vec<u8>,
    /// Descriptors that travel with it (`SCM_RIGHTS`).
    #[n(2)]
    pub files: Vec<FileId>,
    /// Sender's pid, uid, gid (`SCM_CREDENTIALS`).
    #[n(3)]
    pub credentials: Option<(i32, u32, u32)>,
}

/// AF_UNIX socket.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct UnixSocket {
    /// Inode number on the primary: the socket's identity.
    #[n(0)]
    pub inode: u64,
    /// `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    #[n(1)]
    pub kind: i32,
    /// Bound address, if any.
    #[n(2)]
    pub address: Option<SocketAddress>,
    /// File system path of the bound socket in the guest, absolute.
    #[n(3)]
    pub path: Option<HostPath>,
    /// Listening, with this backlog.
    #[n(4)]
    pub backlog: Option<i32>,
    /// Connections waiting in accept(2): the inodes of the connecting sockets, oldest first.
    #[n(5)]
    pub waiting: Vec<u64>,
    /// Connected peer's inode.
    #[n(6)]
    pub peer: Option<u64>,
    /// Receive queue, oldest first.
    #[n(7)]
    pub queue: Vec<QueuedMessage>,
    /// shutdown(2): bit 0 receiving, bit 1 sending.
    #[n(8)]
    pub shutdown: u8,
    /// Options that differ from a new socket's.
    #[n(9)]
    pub options: Vec<SocketOption>,
    /// Connected at some time, even where the peer has closed meanwhile.
    #[n(10)]
    pub connected: bool,
    /// Name a datagram socket sends to, inside or outside of the guest.
    #[n(11)]
    pub remote: Option<SocketAddress>,
    /// `SO_PEERCRED`: process, user and group at the other end; of a listener its own.
    #[n(12)]
    pub peer_credentials: Option<(GuestPid, u32, u32)>,
    /// User and group that made the socket; only where it waits in accept(2).
    #[n(13)]
    pub maker: Option<(u32, u32)>,
    /// It waits in accept(2) with bytes that nobody can read: its owner sees a reset.
    #[n(14)]
    #[cbor(default)]
    pub reset: bool,
}

/// UDP socket.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct UdpSocket {
    /// Inode number on the primary.
    #[n(0)]
    pub inode: u64,
    /// `AF_INET` or `AF_INET6`.
    #[n(1)]
    pub family: i32,
    /// Bound address.
    #[n(2)]
    pub local: Option<SocketAddress>,
    /// Connected address.
    #[n(3)]
    pub remote: Option<SocketAddress>,
    /// Receive queue.
    #[n(4)]
    pub queue: Vec<QueuedMessage>,
    /// Options that differ from a new socket's.
    #[n(5)]
    pub options: Vec<SocketOption>,
}

/// TCP socket.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct TcpSocket {
    /// Inode number on the primary.
    #[n(0)]
    pub inode: u64,
    /// `AF_INET` or `AF_INET6`.
    #[n(1)]
    pub family: i32,
    /// Bound address.
    #[n(2)]
    pub local: Option<SocketAddress>,
    /// Its state.
    #[n(3)]
    pub state: TcpState,
    /// Options that differ from a new socket's.
    #[n(4)]
    pub options: Vec<SocketOption>,
    /// `IPPROTO_TCP` or `IPPROTO_MPTCP`, which the Go runtime listens with.
    #[n(5)]
    pub protocol: i32,
}

/// State of a TCP socket.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum TcpState {
    /// Neither listening nor connected.
    #[n(0)]
    Closed,
    /// listen(2).
    #[n(1)]
    Listening {
        /// Backlog.
        #[n(0)]
        backlog: i32,
    },
    /// Connected, perhaps half closed.
    #[n(2)]
    Connected(#[n(0)] Box<TcpConnection>),
    /// A connection that cannot be carried on (reason): its owner sees a reset.
    #[n(3)]
    Lost {
        /// Why.
        #[n(0)]
        reason: String,
        /// Remote address.
        #[n(1)]
        remote: Option<SocketAddress>,
    },
}

/// An established TCP connection (tcp(7), `TCP_REPAIR`).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct TcpConnection {
    /// Remote address.
    #[n(0)]
    pub remote: SocketAddress,
    /// `TCP_ESTABLISHED` and so on, the kernel's numbers.
    #[n(1)]
    pub kernel_state: u8,
    /// Sequence number of the first byte that is not acknowledged.
    #[n(2)]
    pub send_unacknowledged: u32,
    /// Bytes from there: sent but not acknowledged …
    #[n(3)]
    #[cbor(with = "minicbor::bytes")]
    pub sent: Vec<u8>,
    /// … and not sent yet.
    #[n(4)]
    #[cbor(with = "minicbor::bytes")]
    pub unsent: Vec<u8>,
    /// Sequence number of the first byte not received.
    #[n(5)]
    pub receive_next: u32,
    /// Received and not read.
    #[n(6)]
    #[cbor(with = "minicbor::bytes")]
    pub unread: Vec<u8>,
    /// `TCP_MAXSEG` at the handshake.
    #[n(7)]
    pub mss_clamp: u32,
    /// Window scales of the peer and ours; none where not negotiated.
    #[n(8)]
    pub window_scales: Option<(u8, u8)>,
    /// SACK negotiated.
    #[n(9)]
    pub sack: bool,
    /// `TCP_TIMESTAMP`; none where not negotiated.
    #[n(10)]
    pub timestamp: Option<u32>,
    /// `struct tcp_repair_window`: snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup.
    #[n(11)]
    pub window: [u32; 5],
}

/// Segments of a connection's first flight (RFC 6928), where nothing else is said.
pub const FIRST_FLIGHT: u32 = 10;

impl TcpConnection {
    /// Whether everything that was sent and not acknowledged can be sent again at once, if the
    /// first flight of a restored connection has so many segments. Then it
    /// is restored as not sent, and a peer that lacks it has it without a timeout. Otherwise it
    /// is restored as sent: a peer that has it may acknowledge it before we send it again, and
    /// TCP ignores an acknowledgement of what it has not sent.
    pub fn resends_at_once(&self, first_flight: u32) -> bool {
        let flight = first_flight as usize * self.mss_clamp.clamp(88, 1400) as usize;
        self.sent.len() <= flight
    }

    /// How much the peer takes. What was sent it had room for then, however little it offers now.
    pub fn send_window(&self) -> u32 {
        self.window[1].max(self.sent.len() as u32)
    }
}

/// AF_NETLINK socket.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct NetlinkSocket {
    /// Protocol.
    #[n(0)]
    pub protocol: i32,
    /// `SOCK_RAW` or `SOCK_DGRAM`.
    #[n(1)]
    pub kind: i32,
    /// Bound address.
    #[n(2)]
    pub local: Option<SocketAddress>,
    /// Options that differ from a new socket's.
    #[n(3)]
    pub options: Vec<SocketOption>,
}
