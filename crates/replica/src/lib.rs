//! The stream from primary to spare and its acknowledgements.
//!
//! Frames ([`frame`]) over a channel (plain TCP or mutual TLS), greeting first, then checkpoints in
//! one direction and acknowledgements in the other. Nothing here starts a thread: the agent gives
//! each loop one.
#![forbid(unsafe_code)]

pub mod bases;
pub mod channel;
pub mod frame;
pub mod fuzz;
pub mod greeting;
pub mod heartbeat;
pub mod kept;
pub mod keys;
pub mod lines;
pub mod message;
pub mod pages;
pub mod receiver;
pub mod sender;
pub mod staging;

pub use channel::{Channel, ChannelError, Hangup, ReadHalf, Security, WriteHalf};
pub use frame::FrameError;
pub use greeting::{Greeting, GreetingError};
pub use heartbeat::{Heart, HeartConfig, HeartEvent, HeartLoop, heart};
pub use kept::Keeper;
pub use keys::Identity;
pub use message::{Goodbye, GoodbyeCode, Hello, HostFacts, HostRole, MemberEntry, Welcome};
pub use pages::{Content, PageRun};
pub use receiver::{Incoming, Receiver, Replier, closed};
pub use sender::{
    Broken, Committed, Compression, PacketSender, PageBatch, Reply, ReplyReader, SendStats, Sender,
    Writer, sender,
};
pub use staging::{Staged, StagedCheckpoint, StagingLimits};
