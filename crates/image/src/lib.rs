//! What a checkpoint is: its types, its bytes, its checks. No files, no sockets.
#![forbid(unsafe_code)]
