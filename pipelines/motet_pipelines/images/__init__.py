"""Draw images: plain drawing, drawing with review, and chats in which pictures are drawn."""
