//! TCP as tcp(7) and `TCP_REPAIR` show it.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use linux_raw_sys::net::{self, tcp_info};

use crate::error::{KernelError, Result};
use crate::socket::{
    get_option, get_option_i32, receive, send, set_option, set_option_i32, unread_bytes,
};

/// What of `struct tcp_info` we use; one getsockopt(2), consistent in itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// `TCP_ESTABLISHED` and so on.
    pub state: u8,
    /// `TCPI_OPT_*`: timestamps, SACK, window scaling.
    pub options: u8,
    /// Window scales: the peer's, ours.
    pub window_scales: (u8, u8),
    /// Segments sent and not acknowledged; for a listener the connections that wait.
    pub unacknowledged_segments: u32,
    /// Bytes ever acknowledged by the peer.
    pub bytes_acknowledged: u64,
    /// Bytes ever received in order.
    pub bytes_received: u64,
    /// Bytes in the send queue that were not sent yet.
    pub unsent_bytes: u32,
    /// Largest send window the peer offers now, bytes.
    pub send_window: u32,
    /// Window we offer, bytes.
    pub receive_window: u32,
    /// Segments that may be under way.
    pub congestion_window: u32,
    /// Backlog, for a listener.
    pub backlog: u32,
    /// How often the oldest of them was sent again, in vain so far.
    pub retransmits: u8,
    /// After how long what is not acknowledged is sent again, microseconds.
    pub retransmit_after_us: u32,
    /// Segments that were ever sent again.
    pub sent_again: u32,
}

/// Bit of [`TcpInfo::options`]: timestamps were negotiated.
pub const OPTION_TIMESTAMPS: u8 = net::TCPI_OPT_TIMESTAMPS as u8;
/// Bit of [`TcpInfo::options`]: SACK was negotiated.
pub const OPTION_SACK: u8 = net::TCPI_OPT_SACK as u8;
/// Bit of [`TcpInfo::options`]: window scaling was negotiated.
pub const OPTION_WINDOW_SCALE: u8 = net::TCPI_OPT_WSCALE as u8;

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

fn double_word(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// `TCP_INFO`. Needs the fields up to `tcpi_rcv_wnd` (Linux 6.2).
pub fn info(fd: BorrowedFd<'_>) -> Result<TcpInfo> {
    let mut bytes = [0u8; size_of::<tcp_info>()];
    let length = get_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
    let bytes = &bytes[..length.min(bytes.len())];
    if bytes.len() < offset_of!(tcp_info, tcpi_rcv_wnd) + 4 {
        return Err(KernelError::Unexpected(format!("TCP_INFO of {length} bytes")));
    }
    Ok(TcpInfo {
        state: bytes[0],
        options: bytes[offset_of!(tcp_info, tcpi_options)],
        window_scales: (bytes[6] & 15, bytes[6] >> 4),
        unacknowledged_segments: word(bytes, offset_of!(tcp_info, tcpi_unacked)),
        bytes_acknowledged: double_word(bytes, offset_of!(tcp_info, tcpi_bytes_acked)),
        bytes_received: double_word(bytes, offset_of!(tcp_info, tcpi_bytes_received)),
        unsent_bytes: word(bytes, offset_of!(tcp_info, tcpi_notsent_bytes)),
        send_window: word(bytes, offset_of!(tcp_info, tcpi_snd_wnd)),
        receive_window: word(bytes, offset_of!(tcp_info, tcpi_rcv_wnd)),
        congestion_window: word(bytes, offset_of!(tcp_info, tcpi_snd_cwnd)),
        backlog: word(bytes, offset_of!(tcp_info, tcpi_sacked)),
        retransmits: bytes[offset_of!(tcp_info, tcpi_retransmits)],
        retransmit_after_us: word(bytes, offset_of!(tcp_info, tcpi_rto)),
        sent_again: word(bytes, offset_of!(tcp_info, tcpi_total_retrans)),
    })
}

/// `TCP_TIMESTAMP`: the value the next segment would carry. The lowest bit says that it counts µs.
pub fn timestamp(fd: BorrowedFd<'_>) -> Result<u32> {
    Ok(get_option_i32(fd, libc::IPPROTO_TCP, libc::TCP_TIMESTAMP)? as u32)
}

/// Unread bytes, without taking them; those before urgent data only, if there is any.
pub fn peek_unread(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    // Not zeroes, which would get their memory only when the kernel copies to them; if there is
    // none then, it copies a part and says nothing.
    let mut bytes = vec![1u8; unread_bytes(fd)?];
    if !bytes.is_empty() {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let length = receive(fd, &mut bytes, flags)?.unwrap_or(0);
        bytes.truncate(length);
    }
    Ok(bytes)
}

/// Which queue a [`Repair`] works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// None: the state in which traffic on the socket is not disturbed.
    None,
    /// Received bytes.
    Receive,
    /// Bytes to send. While it is selected the socket sends nothing, but believes it does.
    Send,
}

/// `struct tcp_repair_window`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepairWindow {
    /// Sequence number of the segment that last changed the send window.
    pub changed_at: u32,
    /// Send window.
    pub send: u32,
    /// Largest send window the peer ever offered.
    pub send_max: u32,
    /// Receive window.
    pub receive: u32,
    /// Up to where bytes were received when the receive window was last told.
    pub told_at: u32,
}

/// What was agreed in the handshake (`TCP_REPAIR_OPTIONS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandshakeOptions {
    /// Largest segment the peer takes.
    pub mss_clamp: u32,
    /// Window scales: the peer's, ours.
    pub window_scales: Option<(u8, u8)>,
    /// Selective acknowledgements.
    pub sack: bool,
    /// Timestamps.
    pub timestamps: bool,
}

/// A socket in repair mode (`TCP_REPAIR`). Needs `CAP_NET_ADMIN` in the socket's namespace.
///
/// Dropping it leaves repair mode without a word on the wire; [`Repair::go_live`] sends a window
/// probe. Either way the kernel forgets `SO_REUSEADDR`: the caller sets it again.
#[derive(Debug)]
pub struct Repair<'a> {
    fd: BorrowedFd<'a>,
    armed: bool,
}

const TCP: i32 = libc::IPPROTO_TCP;
/// Option kinds of the TCP header (RFC 9293, RFC 7323, RFC 2018).
const OPTION_KIND_MSS: u32 = 2;
const OPTION_KIND_WINDOW: u32 = 3;
const OPTION_KIND_SACK: u32 = 4;
const OPTION_KIND_TIMESTAMP: u32 = 8;
/// From `linux/tcp.h`.
const REPAIR_OFF_SILENT: i32 = net::TCP_REPAIR_OFF_NO_WP;

impl<'a> Repair<'a> {
    /// Enters repair mode.
    pub fn enter(fd: BorrowedFd<'a>) -> Result<Self> {
        set_option_i32(fd, TCP, libc::TCP_REPAIR, 1)?;
        Ok(Self { fd, armed: true })
    }

    /// A socket that was left in repair mode with [`Repair::keep`].
    pub fn resume(fd: BorrowedFd<'a>) -> Self {
        Self { fd, armed: true }
    }

    /// Leaves the socket in repair mode beyond the life of this handle.
    pub fn keep(mut self) {
        self.armed = false;
    }

    /// Leaves repair mode and sends a window probe, which the peer answers.
    pub fn go_live(mut self) -> Result<()> {
        self.armed = false;
        set_option_i32(self.fd, TCP, libc::TCP_REPAIR, 0)
    }

    /// Selects a queue.
    pub fn select(&self, queue: Queue) -> Result<()> {
        let number = match queue {
            Queue::None => 0,
            Queue::Receive => 1,
            Queue::Send => 2,
        };
        set_option_i32(self.fd, TCP, libc::TCP_REPAIR_QUEUE, number)
    }

    /// Sequence number at the end of the selected queue.
    pub fn sequence(&self) -> Result<u32> {
        Ok(get_option_i32(self.fd, TCP, libc::TCP_QUEUE_SEQ)? as u32)
    }

    /// Sets the sequence number of the selected queue; before connect(2) only.
    pub fn set_sequence(&self, sequence: u32) -> Result<()> {
        set_option_i32(self.fd, TCP, libc::TCP_QUEUE_SEQ, sequence as i32)
    }

    /// The handshake's segment size limit.
    pub fn mss_clamp(&self) -> Result<u32> {
        Ok(get_option_i32(self.fd, TCP, libc::TCP_MAXSEG)? as u32)
    }

    /// All bytes of the selected queue, which stay there; `expected` is about how many. The first
    /// may have been acknowledged.
    ///
    /// A buffer that is too small the kernel fills, and tells the length of all that there is
    /// (`tcp_peek_sndq`).
    pub fn peek(&self, expected: usize) -> Result<Vec<u8>> {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let mut bytes = Vec::new();
        let mut room = expected;
        while bytes.len() < room {
            bytes = vec![0u8; room];
            room = receive(self.fd, &mut bytes, flags)?.unwrap_or(0);
        }
        bytes.truncate(room);
        Ok(bytes)
    }

    /// Appends bytes to the selected queue; how many were taken.
    pub fn append(&self, bytes: &[u8]) -> Result<usize> {
        send(self.fd, bytes, libc::MSG_DONTWAIT)
    }

    /// `TCP_REPAIR_WINDOW`.
    pub fn window(&self) -> Result<RepairWindow> {
        let mut bytes = [0u8; 20];
        get_option(self.fd, TCP, libc::TCP_REPAIR_WINDOW, &mut bytes)?;
        Ok(RepairWindow {
            changed_at: word(&bytes, 0),
            send: word(&bytes, 4),
            send_max: word(&bytes, 8),
            receive: word(&bytes, 12),
            told_at: word(&bytes, 16),
        })
    }

    /// Sets `TCP_REPAIR_WINDOW`; after connect(2).
    pub fn set_window(&self, window: RepairWindow) -> Result<()> {
        let RepairWindow { changed_at, send, send_max, receive, told_at } = window;
        let words = [changed_at, send, send_max, receive, told_at];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        set_option(self.fd, TCP, libc::TCP_REPAIR_WINDOW, &bytes)
    }

    /// `TCP_REPAIR_OPTIONS`; after connect(2).
    pub fn set_handshake(&self, options: HandshakeOptions) -> Result<()> {
        let mut words = vec![OPTION_KIND_MSS, options.mss_clamp];
        if let Some((peer, ours)) = options.window_scales {
            words.extend([OPTION_KIND_WINDOW, u32::from(peer) | u32::from(ours) << 16]);
        }
        if options.sack {
            words.extend([OPTION_KIND_SACK, 0]);
        }
        if options.timestamps {
            words.extend([OPTION_KIND_TIMESTAMP, 0]);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        set_option(self.fd, TCP, libc::TCP_REPAIR_OPTIONS, &bytes)
    }

    /// Sets `TCP_TIMESTAMP`.
    pub fn set_timestamp(&self, value: u32) -> Result<()> {
        set_option_i32(self.fd, TCP, libc::TCP_TIMESTAMP, value as i32)
    }
}

impl Drop for Repair<'_> {
    fn drop(&mut self) {
        if self.armed {
            // Fails only on a socket that has been aborted, which has nothing left to repair.
            let _ = set_option_i32(self.fd, TCP, libc::TCP_REPAIR, REPAIR_OFF_SILENT);
        }
    }
}
